"""`dpfed list`: what can be named in a configuration."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer


class What(StrEnum):
    algorithms = "algorithms"
    models = "models"
    datasets = "datasets"
    presets = "presets"


def list_names(
    what: Annotated[What, typer.Argument(help="what to list")],
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line")
    ] = False,
) -> None:
    """What can be named in a configuration. Example: dpfed list algorithms"""
    from dpfed.registry import registry

    known = registry()
    table = {
        What.algorithms: {n: cls.summary for n, cls in known.algorithm.items()},
        What.models: {n: _doc(cls) for n, cls in known.model.items()},
        What.datasets: {n: _doc(cls) for n, cls in known.data.items()},
        What.presets: {
            n: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            for n, path in known.presets.items()
        },
    }[what]
    if as_json:
        print(json.dumps({"names": list(table)}))
        return
    for name, sentence in table.items():
        print(f"{name:{max(map(len, table))}}  {sentence}")


def _doc(cls: type) -> str:
    import sys

    text = getattr(cls, "summary", "") or sys.modules[cls.__module__].__doc__ or ""
    return text.strip().split("\n")[0]

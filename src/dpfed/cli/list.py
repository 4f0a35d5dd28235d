"""`dpfed list`: list the names that a configuration can use."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from dpfed.cli.options import AsJson, show


class What(StrEnum):
    algorithms = "algorithms"
    models = "models"
    datasets = "datasets"
    presets = "presets"


def list_names(
    what: Annotated[What, typer.Argument(help="what to list")],
    as_json: AsJson = False,
) -> None:
    """List the names that a configuration can use. Example: dpfed list algorithms"""
    from dpfed.registry import registry

    known = registry()
    if what == What.presets:
        first_lines = {
            name: path.read_text(encoding="utf-8").splitlines()[0]
            for name, path in known.presets.items()
        }
        table = {name: line.lstrip("# ") for name, line in first_lines.items()}
    else:
        classes = {
            What.algorithms: known.algorithm,
            What.models: known.model,
            What.datasets: known.data,
        }[what]
        table = {name: _sentence(cls) for name, cls in classes.items()}
    width = max(map(len, table))
    lines = [f"{name:{width}}  {sentence}" for name, sentence in table.items()]
    show([] if as_json else lines, {"names": list(table)}, as_json)


def _sentence(cls: type) -> str:
    """Return the summary of a class, or the first line of its module's docstring."""
    text = getattr(cls, "summary", "") or sys.modules[cls.__module__].__doc__ or ""
    return text.strip().split("\n")[0]

"""`dpfed list`: list the names that a configuration can use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

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
    named: Mapping[str, Any] = {
        What.algorithms: known.algorithm,
        What.models: known.model,
        What.datasets: known.data,
        What.presets: known.presets,
    }[what]
    table = {name: _sentence(thing) for name, thing in named.items()}
    width = max(map(len, table))
    lines = [f"{name:{width}}  {sentence}" for name, sentence in table.items()]
    show([] if as_json else lines, {"names": list(table)}, as_json)


def _sentence(thing: Any) -> str:
    """Return a description of an algorithm, a model, a data set or a preset in one line.

    For a class it is the attribute `summary`, or else the first line of its module's docstring. For
    a preset, `thing` is a path, and the description is the first line of the file.
    """
    if isinstance(thing, Path):
        return thing.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    text = getattr(thing, "summary", "") or sys.modules[thing.__module__].__doc__ or ""
    return text.strip().split("\n")[0]

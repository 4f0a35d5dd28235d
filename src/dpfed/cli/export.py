"""`dpfed export`: write a run's model as a peft adapter or a whole model, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfed.cli.options import AsJson, Debug, show


def export(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Argument(help="new folder for the adapter")],
    merge: Annotated[
        bool, typer.Option(help="join the adapter with its base and write a whole model")
    ] = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model in peft's format, with a model card.

    Example: dpfed export runs/my-run my-adapter
    """
    from dpfed.report.model_card import write_export

    kind = write_export(run, out, merge)
    line = f"{kind} and model card written to {out}"
    show([line], {"out": str(out), "kind": kind}, as_json)

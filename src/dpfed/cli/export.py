"""`dpfed export`: a run's model as a peft adapter or a whole model, with its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Argument(help="new folder for the adapter")],
    merge: Annotated[
        bool, typer.Option(help="join the adapter with its base and write a whole model")
    ] = False,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Write a run's model in peft's format, with a model card. Example: dpfed export runs/my-run my-adapter"""
    from dpfed.report.model_card import write_export

    kind = write_export(run, out, merge)
    print(f"{kind} and model card written to {out}")
    if as_json:
        print(json.dumps({"out": str(out), "kind": kind}))

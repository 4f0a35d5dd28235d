"""Arguments, options and output functions that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpfed.config import Config

Target = Annotated[
    str | None, typer.Argument(help="TOML file or preset; without it: the digits demonstration")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
]
Debug = Annotated[bool, typer.Option(help="show the traceback of an error")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="no TLS and no keys, for tests on this machine")
]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="each line of the log is one JSON object, on stderr")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on the last line of stdout")]


def settings_of(target: str | None, overrides: list[str] | None) -> Config:
    """Load the configuration `target`, a file or preset, and change it by the `--set` options."""
    from dpfed.config import load
    from dpfed.registry import DEFAULT, registry

    return load(target or DEFAULT, overrides or [], registry())


def show(lines: Sequence[str], result: Any, as_json: bool) -> None:
    """Print the lines; with `as_json` also print the result as a JSON object on the last line."""
    for line in lines:
        print(line)
    if as_json:
        print(json.dumps(result, allow_nan=False))

"""The command line: one file per command, each thin. A person's mistake is one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import click
import typer

from dpfed.cli.audit import audit
from dpfed.cli.bench import bench
from dpfed.cli.client import client
from dpfed.cli.compare import compare
from dpfed.cli.data import data
from dpfed.cli.doctor import doctor
from dpfed.cli.export import export
from dpfed.cli.hints import no_such_option
from dpfed.cli.keys import keys
from dpfed.cli.list import list_names
from dpfed.cli.model import app as model
from dpfed.cli.overview import Command, Screen
from dpfed.cli.privacy import privacy
from dpfed.cli.report import report
from dpfed.cli.run import run
from dpfed.cli.server import server
from dpfed.errors import DpfedError

app = typer.Typer(
    name="dpfed",
    cls=Screen,
    help="Differentially private federated fine-tuning of large models. Try it: dpfed run",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "compare": compare,
    "privacy": privacy,
    "audit": audit,
    "bench": bench,
    "report": report,
    "export": export,
    "list": list_names,
    "server": server,
    "client": client,
    "keys": keys,
    "doctor": doctor,
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)
app.add_typer(data)
app.add_typer(model, name="model")


def show_version(wanted: bool) -> None:
    if wanted:
        import dpfed

        print(f"dpfed {dpfed.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """What `dpfed` takes before a command."""


def main() -> None:
    """Exit codes: 0 done, 1 a defect of the program, 2 a mistake in the input, 3 stopped with results, 4 claim disproved,
    130 Ctrl-C, 143 SIGTERM."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    debug = "--debug" in sys.argv
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        fail("interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    except click.NoSuchOption as error:
        fail(no_such_option(error, sys.argv[1:]), 2)
    except click.ClickException as error:
        fail(error.format_message(), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except DpfedError as error:
        if debug:
            traceback.print_exc()
        fail(str(error), error.code)


def fail(sentence: str, code: int) -> None:
    rank = os.environ.get("RANK", "0")  # of several processes, under torchrun
    who = "dpfed" if rank == "0" else f"dpfed, process {rank}"
    said = sentence.strip().rstrip(".")
    print(f"{who}: {said}{'' if said.endswith(('?', '!')) else '.'}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

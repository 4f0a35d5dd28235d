"""The command line `dpfed`: gathers the commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

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
from dpfed.cli.model import model
from dpfed.cli.overview import Command, Screen
from dpfed.cli.plan import plan
from dpfed.cli.privacy import privacy
from dpfed.cli.report import report
from dpfed.cli.run import run
from dpfed.cli.server import server
from dpfed.errors import DpfedError

QUIET_LIBRARIES = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
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
    "plan": plan,
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
app.add_typer(model)


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
    """Accept the options that stand before a command, such as --version."""


def main() -> None:
    """Run the command line, and exit with one of the codes of docs/reference/exit-codes.md."""
    for variable, value in QUIET_LIBRARIES.items():
        os.environ.setdefault(variable, value)
    try:
        sys.exit(app(standalone_mode=False))
    except (click.exceptions.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    except click.NoSuchOption as error:
        fail(no_such_option(error, sys.argv[1:]), 2)
    except click.ClickException as error:
        fail(error.format_message(), 2)
    except DpfedError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        fail(str(error), error.code)


def fail(sentence: str, code: int) -> NoReturn:
    # torchrun sets RANK to the number of each process. Messages name the process, except the first,
    # rank 0.
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f", process {rank}"
    text = sentence.strip().rstrip(".")
    full_stop = "" if text.endswith(("?", "!")) else "."
    print(f"dpfed{process}: {text}{full_stop}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

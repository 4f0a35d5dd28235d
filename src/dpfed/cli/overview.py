"""Help screens of the command line: the list of commands, and help texts with escaped markup."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_type_hints

import click
import typer.core
from rich.markup import escape
from typer.models import ArgumentInfo

FOOT = (
    "`dpfed COMMAND --help` has every option and an example.  --version: this version\n"
    "--install-completion: complete commands in this shell  "
    "--show-completion: print the script for it"
)


class Command(typer.core.TyperCommand):
    """A command whose help text the package rich prints unchanged.

    Without escapes, rich would take a name such as "[federation.clients]" for markup and hide it.
    """

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with escaped_help([self, *self.params]):
            super().format_help(ctx, formatter)


class Group(typer.core.TyperGroup):
    """A group of commands that suggests the most similar command for a wrong name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            from dpfed.config import nearest

            # Raise the error here, because typer and click would each add a suggestion of their
            # own.
            ctx.fail(f"there is no command {name!r}{nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


@contextmanager
def escaped_help(described: list[Any]) -> Iterator[None]:
    """Within this context, escape square brackets in the help texts of a command.

    The package rich would take text in square brackets for markup.

    described  the command and its parameters
    """
    texts = [(thing, thing.help) for thing in described if getattr(thing, "help", None)]
    for thing, text in texts:
        thing.help = escape(text)
    try:
        yield
    finally:
        for thing, text in texts:
            thing.help = text


class Screen(Group):
    """The help screen of `dpfed`: one line per command, at most 24 lines in all."""

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        command = super().get_command(ctx, name)
        if command is not None:
            restore(command)
        return command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 100))
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        column = max(map(len, commands)) + 4
        lines = [f"Usage: {ctx.command_path} COMMAND [OPTIONS]", "", self.help or "", ""]
        for name, command in commands.items():
            sentence = first_sentence(command.help or "") if command else ""
            shown = textwrap.shorten(sentence, width - column, placeholder=" ...")
            lines.append(f"  {name:{column - 2}}{shown}")
        formatter.write("\n".join([*lines, "", FOOT]) + "\n")


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, without its example."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return paragraph.split(" Example:")[0].split(". ")[0].rstrip(".")


def restore(command: click.Command) -> None:
    """Restore the help texts of a command's arguments, which newer versions of click remove."""
    for inner in getattr(command, "commands", {}).values():
        restore(inner)
    if command.callback is None:
        return
    hints = get_type_hints(command.callback, include_extras=True)
    for param in command.params:
        for extra in get_args(hints.get(param.name or ""))[1:]:
            if isinstance(extra, ArgumentInfo) and not getattr(param, "help", None):
                param.help = extra.help

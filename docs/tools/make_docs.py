"""Write the parts of the documentation that follow from the program: keys, commands, outputs.

    python docs/tools/make_docs.py            write them
    python docs/tools/make_docs.py --check    write nothing; exit with 1 and name the stale pages

In a page, a comment before a block says where the block comes from:

    <!-- output of: dpfed ... -->    the output of a command
    <!-- text of: FILE -->           the text of a file
    <!-- table of: NAME -->          a table of `TABLES` below
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import io
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import typer.main
from annotated_types import Ge, Gt, Le, Lt

from dpfed.cli.main import app
from dpfed.cli.main import main as dpfed
from dpfed.config import Config, DataSection, LoraSection, ModelSection
from dpfed.registry import registry

DOCS = Path(__file__).parents[1]
NOTE = "<!-- written by docs/tools/make_docs.py: change the program, not this page -->\n"
NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): ""}
SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}


# ------------------------------------------------------------------ configuration keys


def allowed(hint: Any) -> str:
    """Return the values that a key may have, in words, from its type and its range."""
    if not hasattr(hint, "__metadata__"):
        return _kind(hint)
    base, *extra = get_args(hint)
    limits = [
        f"{SIGNS[type(e)][1]} {getattr(e, SIGNS[type(e)][0]):g}" for e in extra if type(e) in SIGNS
    ]
    return ", ".join([_kind(base), *limits])


def _kind(base: Any) -> str:
    origin = get_origin(base)
    if hasattr(base, "__metadata__"):
        return allowed(base)
    if origin is Literal:
        return " · ".join(f"`{_toml(value)}`" for value in get_args(base))
    if origin in (Union, types.UnionType):
        return " or ".join(text for text in map(_kind, get_args(base)) if text)
    if origin is tuple:
        inner = get_args(base)[0]
        return f"list of {NAMES[inner]}s" if inner in NAMES else f"list of {_kind(inner)}"
    if origin is dict:
        return f"table of names, each a {allowed(get_args(base)[1])}"
    return NAMES.get(base, getattr(base, "__name__", str(base)))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def key_table(cls: type[Any], leave_out: frozenset[str] = frozenset()) -> list[str]:
    """Return a table of the keys of a section; tables of their own are left out."""
    hints = get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        name, default = field.name, field.default
        if name in leave_out or dataclasses.is_dataclass(hints[name]):
            continue
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        sentence = next((a for a in get_args(hints[name])[1:] if isinstance(a, str)), "")
        shown = f"`{_toml(default)}`"
        if default is dataclasses.MISSING:
            shown = "required"
        elif default in (None, {}):
            shown = ""
        rows.append(f"| `{name}` | {_cell(allowed(hints[name]))} | {shown} | {_cell(sentence)} |")
    return ["| key | values | default | what it is |", "|---|---|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def configuration() -> str:
    """Return the page of all configuration keys."""
    known = registry()
    lines = [
        "# Configuration",
        "",
        NOTE,
        "A run is one TOML file (or a preset) and any number of overrides, "
        "`--set section.key=value`. An unknown key, a wrong",
        "type or a value out of range ends with exit code 2 and one sentence. "
        '`extends = "other.toml"` takes another file first.',
        "Empty defaults are unset. Naming another data source, model or algorithm drops the keys "
        "that belonged to the old one.",
        "",
        "## [data]",
        "",
        *key_table(DataSection),
        *_further("data", known.data, DataSection),
        "## [model]",
        "",
        *key_table(ModelSection),
        "### [model.lora]",
        "",
        *key_table(LoraSection),
        *_further("model", known.model, ModelSection),
        "## [algorithm]",
        "",
        "`name` is one of the algorithms below; the default is `dp-fedadamw`. "
        "Each has its own keys and defaults.",
        "",
    ]
    for name, cls in known.algorithm.items():
        lines += [f"### {name}", "", cls.summary + ".", "", *key_table(cls)]
    for name, cls in sections().items():
        lines += [f"## [{name}]", "", *key_table(cls)]
    return "\n".join(lines).rstrip() + "\n"


def sections() -> dict[str, type[Any]]:
    """Return the sections without a `name`, which have one set of keys each."""
    out = {}
    for name, hint in get_type_hints(Config).items():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                out[name] = part
    return {name: cls for name, cls in out.items() if name not in ("data", "model")}


def _further(section: str, named: Any, common: type[Any]) -> list[str]:
    """Return tables of the keys that only some names have; equal tables are merged."""
    shared = frozenset(field.name for field in dataclasses.fields(common))
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cls in named.items():
        table = tuple(key_table(cls, shared))
        if len(table) > 3:
            groups.setdefault(table, []).append(name)
    lines = []
    for table, names in groups.items():
        lines += [f"### {section}.name = {', '.join(names)}", "", *table]
    return lines


# ------------------------------------------------------------------ commands


def commands(
    group: click.Command, path: tuple[str, ...] = ("dpfed",)
) -> Iterator[tuple[str, click.Command]]:
    """Yield the words and the object of each command, at any depth."""
    inner = getattr(group, "commands", None)
    if inner is None:
        yield " ".join(path), group
        return
    for name in inner:
        command = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
        yield from commands(command, (*path, name))


def command_line() -> str:
    """Return the page of all commands and options."""
    lines = [
        "# Command line",
        "",
        NOTE,
        "`dpfed --help` shows the commands, `dpfed COMMAND --help` this. "
        "`dpfed --install-completion` teaches the shell to",
        "complete them. Exit codes have [a page of their own](exit-codes.md).",
        "",
    ]
    for path, command in commands(typer.main.get_command(app)):
        lines += [f"## {path}", "", *_described(command.help or ""), *_parameters(command)]
    return "\n".join(lines).rstrip() + "\n"


def _described(text: str) -> list[str]:
    paragraphs = []
    example = ""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        sentence, mark, after = paragraph.partition("Example: ")
        if sentence.strip():
            paragraphs += [_code(" ".join(sentence.split())), ""]
        if mark:
            example = after.strip()
    return [*paragraphs, "```text", example, "```", ""]


def _code(sentence: str) -> str:
    """Return a sentence with its options as code, so that Markdown keeps their dashes."""
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]+)", r"`\1`", sentence)


def _parameters(command: click.Command) -> list[str]:
    rows = [_row(param) for param in command.params if param.name != "help"]
    return ["| option | what it does |", "|---|---|", *rows, ""] if rows else []


def _row(param: click.Parameter) -> str:
    shown = (param.metavar or param.name or "").upper()
    default = ""
    if isinstance(param, click.Option):
        shown = " ".join(param.opts)
        if not param.is_flag:
            shown += " " + (param.metavar or param.type.name.upper())
            number = isinstance(param.default, int | float) and param.default
            default = f"; default {param.default}" if number else ""
    needed = " (required)" if param.required else ""
    return f"| `{shown}` | {_cell(_code(getattr(param, 'help', '') or ''))}{default}{needed} |"


# ------------------------------------------------------------------ outputs and tables in pages

SIGMAS = (0.6, 0.8, 1.0, 1.5, 2.0, 4.0)
RECORDS = (250, 1000, 4000, 16000)


def cell(sigma: float, records: int) -> float:
    """Return epsilon of a client in every round: batch 16, 100 rounds of 10 steps, delta 1e-5."""
    from dpfed.algorithms.base import Releases
    from dpfed.privacy.accounting.planner import PlanNumbers

    numbers = PlanNumbers(
        records=records,
        batch=16,
        rounds=100,
        local_steps=10,
        participation=1.0,
        sigma=sigma,
        delta=1e-5,
        sampling="poisson",
        target_epsilon=None,
        view="server_worst",
        clients=None,
        releases=Releases(),
        colluding=0,
    )
    return numbers.planned().server_worst


def epsilon_table() -> str:
    """Return a table of epsilons by noise multiplier and records."""
    from dpfed.privacy.published import show_loss

    rows = [["noise multiplier", *(f"{records:,} records" for records in RECORDS)]]
    rows += [[f"{s:g}", *(show_loss(cell(s, r), 2) for r in RECORDS)] for s in SIGMAS]
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


TABLES: dict[str, Callable[[], str]] = {"epsilon": epsilon_table}
OUTPUT = re.compile(r"(<!-- output of: (dpfed [^>]*?) -->\n```text\n)(.*?)(```)", re.S)
FILE = re.compile(r"(<!-- text of: (\S+) -->\n```python\n)(.*?)(```\n)", re.S)
TABLE = re.compile(r"(<!-- table of: (\w+) -->\n\n)(.*?)(\n\n)", re.S)


def printed(command: str) -> str:
    """Return the text that a command prints to stdout, run in this process."""
    arguments = sys.argv
    sys.argv = shlex.split(command)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            dpfed()
    finally:
        sys.argv = arguments
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def text_of(file: str) -> str:
    return (DOCS.parent / file).read_text(encoding="utf-8")


SOURCES: dict[re.Pattern[str], Callable[[str], str]] = {
    OUTPUT: printed,
    FILE: text_of,
    TABLE: lambda name: TABLES[name](),
}
GENERATED: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/command-line.md": command_line,
}


def pages() -> dict[Path, str]:
    """Return the current text of every page that is generated, wholly or in part."""
    out = {DOCS / name: make() for name, make in GENERATED.items()}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path not in out:
            for pattern, source in SOURCES.items():
                text = pattern.sub(lambda m, source=source: m[1] + source(m[2]) + m[4], text)
            out[path] = text
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only name the stale pages")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(f"{'not up to date' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

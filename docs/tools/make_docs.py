"""Writes what the documentation says of the program out of the program: keys, commands, functions, and outputs of commands.

    python docs/tools/make_docs.py            writes
    python docs/tools/make_docs.py --check    writes nothing, exits with 1 and names what is not up to date

In the pages, `<!-- output of: dpfed ... -->` is followed by a block that holds what that command prints,
`<!-- text of: FILE -->` by a block that holds a file, and `<!-- table of: NAME -->` by a table that a function here makes.
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

from dpfed.algorithms import base as contract
from dpfed.cli.main import app
from dpfed.config import Config, DataSection, LoraSection, ModelSection, keys
from dpfed.registry import registry

DOCS = Path(__file__).parents[1]
NOTE = "<!-- written by docs/tools/make_docs.py: change the program, not this page -->\n"


# ------------------------------------------------------------------ every configuration key


def allowed(hint: Any) -> str:
    """The values of a key in words, from its type and its range."""
    if get_origin(hint) is None and hint in NAMES:
        return NAMES[hint]
    base, *extra = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    signs = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
    limits = [
        f"{signs[type(e)][1]} {getattr(e, signs[type(e)][0]):g}" for e in extra if type(e) in signs
    ]
    return ", ".join([_kind(base), *limits])


NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): ""}


def _kind(base: Any) -> str:
    if get_origin(base) is Literal:
        return " · ".join(f"`{_toml(value)}`" for value in get_args(base))
    if get_origin(base) in (Union, types.UnionType):
        return " or ".join(text for text in map(_kind, get_args(base)) if text)
    if get_origin(base) is tuple:
        inner = get_args(base)[0]
        return f"list of {NAMES[inner]}s" if inner in NAMES else f"list of {_kind(inner)}"
    if get_origin(base) is dict:
        return f"table of names, each a {allowed(get_args(base)[1])}"
    if hasattr(base, "__metadata__"):
        return allowed(base)
    return NAMES.get(base, getattr(base, "__name__", str(base)))


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def key_table(cls: type[Any], leave_out: set[str] | frozenset[str] = frozenset()) -> list[str]:
    hints = get_type_hints(cls, include_extras=True)
    factories = {f.name: f.default_factory for f in dataclasses.fields(cls)}
    made_anew = {
        name: make() for name, make in factories.items() if make is not dataclasses.MISSING
    }
    rows = []
    for name, sentence, default in keys(cls):
        if name in leave_out or dataclasses.is_dataclass(hints[name]):
            continue
        made = made_anew.get(name, default)
        shown = (
            "required"
            if made is dataclasses.MISSING
            else f"`{_toml(made)}`"
            if made not in (None, {})
            else ""
        )
        rows.append(f"| `{name}` | {_cell(allowed(hints[name]))} | {shown} | {_cell(sentence)} |")
    return ["| key | values | default | what it is |", "|---|---|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _either(code: str) -> str:
    """A type inside a table: a bar in code is read differently by different readers of Markdown."""
    return code.replace(" | ", " or ")


def _names(cls: type[Any]) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


def configuration() -> str:
    known = registry()
    lines = [
        "# Configuration",
        "",
        NOTE,
        "A run is one TOML file (or a preset) and any number of overrides, `--set section.key=value`. An unknown key, a wrong",
        'type or a value out of range ends with exit code 2 and one sentence. `extends = "other.toml"` takes another file first.',
        "Empty defaults are unset. Naming another data source, model or algorithm drops the keys that belonged to the old one.",
        "",
        "## [data]",
        "",
        *key_table(DataSection),
        *_further("data", known.data, _names(DataSection)),
        "## [model]",
        "",
        *key_table(ModelSection),
        "### [model.lora]",
        "",
        *key_table(LoraSection),
        *_further("model", known.model, _names(ModelSection)),
        "## [algorithm]",
        "",
        "`name` is one of the algorithms below; the default is `dp-fedadamw`. Each has its own keys and defaults.",
        "",
    ]
    for name, cls in known.algorithm.items():
        lines += [f"### {name}", "", cls.summary + ".", "", *key_table(cls)]
    for name, cls in sections().items():
        lines += [f"## [{name}]", "", *key_table(cls)]
    return "\n".join(lines).rstrip() + "\n"


def sections() -> dict[str, type[Any]]:
    """The sections that have no `name`: each has one set of keys."""
    out = {}
    for name, hint in get_type_hints(Config).items():
        cls = next(
            (part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None
        )
        if isinstance(cls, type) and name not in ("data", "model"):
            out[name] = cls
    return out


def _further(section: str, named: Any, common: frozenset[str]) -> list[str]:
    """Keys that belong to one name only; names with the same further keys share a table."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cls in named.items():
        table = tuple(key_table(cls, common))
        if len(table) > 3:
            groups.setdefault(table, []).append(name)
    lines = []
    for table, names in groups.items():
        lines += [f"### {section}.name = {', '.join(names)}", "", *table]
    return lines


# ------------------------------------------------------------------ every command


def commands(
    group: click.Command, path: tuple[str, ...] = ("dpfed",)
) -> Iterator[tuple[str, click.Command]]:
    inner = getattr(group, "commands", None)
    if inner is None:
        yield " ".join(path), group
        return
    for name in inner:
        command = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
        yield from commands(command, (*path, name))


def command_line() -> str:
    lines = [
        "# Command line",
        "",
        NOTE,
        "`dpfed --help` shows the commands, `dpfed COMMAND --help` this. `dpfed --install-completion` teaches the shell to",
        "complete them. Exit codes have [a page of their own](exit-codes.md).",
        "",
    ]
    for path, command in commands(typer.main.get_command(app)):
        lines += [f"## {path}", "", *_described(command.help or ""), *_parameters(command)]
    return "\n".join(lines).rstrip() + "\n"


def _described(text: str) -> list[str]:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    said, example = [], ""
    for paragraph in paragraphs:
        before, mark, after = paragraph.partition("Example: ")
        said += [" ".join(before.split()), ""] if before.strip() else []
        example = after.strip() if mark else example
    return [*map(_code, said), "```text", example, "```", ""]


def _code(sentence: str) -> str:
    """Options in a sentence as code, so that no dash is lost."""
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]+)", r"`\1`", sentence)


def _parameters(command: click.Command) -> list[str]:
    rows = []
    for param in command.params:
        if param.name in ("help",):
            continue
        shown = (
            " ".join(param.opts)
            if isinstance(param, click.Option)
            else (param.metavar or param.name or "").upper()
        )
        value = ""
        if isinstance(param, click.Option) and not param.is_flag:
            value = " " + (param.metavar or param.type.name.upper())
        needed = " (required)" if param.required else ""
        default = param.default
        said = (
            f"; default {default}"
            if isinstance(default, int | float) and not isinstance(default, bool)
            else ""
        )
        said = said if default and isinstance(param, click.Option) else ""
        rows.append(
            f"| `{shown}{value}` | {_cell(_code(getattr(param, 'help', '') or ''))}{said}{needed} |"
        )
    return ["| option | what it does |", "|---|---|", *rows, ""] if rows else []


# ------------------------------------------------------------------ functions and classes


def api() -> str:
    import dpfed
    from dpfed import errors
    from dpfed.config import load
    from dpfed.privacy.accounting.planner import PlanNumbers
    from dpfed.training.run import run

    lines = [
        "# Python interface",
        "",
        NOTE,
        "`dpfed.fine_tune` and `dpfed.Tuned` are what scripts may rely on between versions. The rest is there to be used too, and",
        "the changelog says when it changes.",
        "",
        *described("dpfed.fine_tune", dpfed.fine_tune),
        *described("dpfed.Tuned", dpfed.Tuned),
        "## Configuration and runs",
        "",
        *described("dpfed.config.load", load, 3),
        *described("dpfed.training.run.run", run, 3),
        *described("dpfed.privacy.accounting.planner.PlanNumbers", PlanNumbers, 3),
        "## The contract of an algorithm",
        "",
        "What [Add an algorithm](../guides/add-an-algorithm.md) builds on.",
        "",
        *described("dpfed.algorithms.base.Algorithm", contract.Algorithm, 3),
        *described("dpfed.algorithms.base.Averaging", contract.Averaging, 3),
        *described("dpfed.algorithms.base.Context", contract.Context, 3),
        *described("dpfed.algorithms.base.Oracle", contract.Oracle, 3),
        *described("dpfed.algorithms.base.Releases", contract.Releases, 3),
        "## Errors",
        "",
    ]
    for cls in (
        errors.DpfedError,
        errors.StoppedError,
        errors.DivergedError,
        errors.InterruptedRunError,
    ):
        lines += described(f"dpfed.errors.{cls.__name__}", cls, 3)
    return "\n".join(lines).rstrip() + "\n"


def described(name: str, thing: Any, level: int = 2) -> list[str]:
    """Signature and docstring; of a class its public members too."""
    lines = ["#" * level + f" {name}", ""]
    if not inspect.isclass(thing):
        return [
            *lines,
            "```text",
            _signature(name.split(".")[-1], thing),
            "```",
            "",
            *_docstring(thing),
            "",
        ]
    lines += [*_docstring(thing), ""]
    rows = []
    for key, member in vars(thing).items():
        called = member.fget if isinstance(member, property) else member
        if (key.startswith("_") and key != "__call__") or not inspect.isfunction(called):
            continue
        shown = key if isinstance(member, property) else _signature(key, called, method=True)
        rows.append(
            f"| `{_either(shown)}` | {_cell(' '.join((inspect.getdoc(called) or '').split()))} |"
        )
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    rows = [
        f"| `{f.name}: {_either(str(f.type))}` | field |"
        for f in fields
        if "Annotated" not in str(f.type)
    ] + rows
    return [*lines, "| member | what it is |", "|---|---|", *rows, ""] if rows else lines


class _Shown(str):
    """A default that is a function has an address for a name, another one in each process."""

    __repr__ = str.__str__


def _unquoted(annotation: Any) -> Any:
    """Return an annotation that is a text as something shown without quotes."""
    return _Shown(annotation) if isinstance(annotation, str) else annotation


def _signature(name: str, called: Any, method: bool = False) -> str:
    found = inspect.signature(called)
    given = [p for i, p in enumerate(found.parameters.values()) if not (method and i == 0)]
    given = [
        p.replace(default=_Shown("...")) if inspect.isfunction(p.default) else p for p in given
    ]
    given = [p.replace(annotation=_unquoted(p.annotation)) for p in given]
    text = str(
        found.replace(parameters=given, return_annotation=_unquoted(found.return_annotation))
    )
    if len(name + text) <= 100 or method:
        return name + text
    parts = [str(p) for p in given]
    if any(p.kind is p.KEYWORD_ONLY for p in given):
        parts.insert(next(i for i, p in enumerate(given) if p.kind is p.KEYWORD_ONLY), "*")
    ending = text[text.rindex(")") :]
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ending


def _docstring(thing: Any) -> list[str]:
    """Paragraphs as they are; lists of parameters and pseudo-code, which are aligned by spaces, as text."""
    out: list[str] = []
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        aligned = re.search(r"\S {2,}\S", paragraph) is not None
        out += ["```text", paragraph, "```", ""] if aligned else [paragraph, ""]
    return out[:-1]


# ------------------------------------------------------------------ outputs and tables inside pages

SIGMAS, RECORDS = (0.6, 0.8, 1.0, 1.5, 2.0, 4.0), (250, 1000, 4000, 16000)


def cell(sigma: float, records: int) -> float:
    """Epsilon of a client in every round: batch 16, 100 rounds of 10 local steps, delta 1e-5."""
    from dpfed.privacy.accounting.planner import PlanNumbers

    plan = PlanNumbers(
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
        batches=1,
        releases=1,
        colluding=0,
    ).planned()
    return plan.server_worst


def epsilon_table() -> str:
    from dpfed.privacy.published import show_loss

    head = "| noise multiplier | " + " | ".join(f"{r:,} records" for r in RECORDS) + " |"
    rows = [
        f"| {s:g} | " + " | ".join(show_loss(cell(s, r), 2) for r in RECORDS) + " |" for s in SIGMAS
    ]
    return "\n".join([head, "|---" * (len(RECORDS) + 1) + "|", *rows])


TABLES: dict[str, Callable[[], str]] = {"epsilon": epsilon_table}
OUTPUT = re.compile(r"(<!-- output of: (dpfed [^>]*?) -->\n```text\n)(.*?)(```)", re.S)
FILE = re.compile(r"(<!-- text of: (\S+) -->\n```python\n)(.*?)(```\n)", re.S)
TABLE = re.compile(r"(<!-- table of: (\w+) -->\n\n)(.*?)(\n\n)", re.S)


def printed(command: str) -> str:
    """What a command prints to stdout, run in this process."""
    from dpfed.cli.main import main

    old, sys.argv = sys.argv, shlex.split(command)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = old
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def refreshed(page: str, tables: bool = True) -> str:
    page = OUTPUT.sub(lambda m: m.group(1) + printed(m.group(2)) + m.group(4), page)
    page = FILE.sub(
        lambda m: m.group(1) + (DOCS.parent / m.group(2)).read_text(encoding="utf-8") + m.group(4),
        page,
    )
    return (
        TABLE.sub(lambda m: m.group(1) + TABLES[m.group(2)]() + m.group(4), page)
        if tables
        else page
    )


GENERATED: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/command-line.md": command_line,
    "reference/api.md": api,
}


def pages() -> dict[Path, str]:
    """Every page that is written here, wholly or in part, as it should be."""
    out = {DOCS / name: make() for name, make in GENERATED.items()}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path not in out and any(pattern.search(text) for pattern in (OUTPUT, FILE, TABLE)):
            out[path] = refreshed(text)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say what is not up to date")
    check = parser.parse_args().check
    old = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path.relative_to(DOCS.parent))
            if not check:
                path.write_text(text, encoding="utf-8")
    for path in old:
        print(f"{'not up to date' if check else 'written'}: {path}")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())

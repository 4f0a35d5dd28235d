"""Help that fits a screen, an example in every command, completion, and exit codes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

import dpfed
import dpfed.cli.main as cli
from dpfed.cli.overview import first_sentence
from dpfed.errors import DpfedError, InterruptedRunError, StoppedError

ROOT = Path(__file__).parents[3]
SCREEN = typer.main.get_command(cli.app)


def commands(
    group: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its path, so that the tests cover new commands."""
    inner = getattr(group, "commands", None)
    if inner is None:
        yield path, group
    for name, command in (inner or {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(SCREEN))
each = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def called(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dpfed", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def help_of(path: tuple[str, ...]) -> str:
    return COMMANDS[path].help or ""


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_first_help_fits_a_screen(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert called(monkeypatch, flag) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert set(names) == {path[0] for path in COMMANDS}
    for line in lines:
        if line.startswith("  "):
            assert len(line.split()) >= 4, f"a command needs a sentence: {line}"


def test_a_narrow_terminal_gets_shorter_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in ("40", "1"):
        monkeypatch.setenv("COLUMNS", columns)
        assert called(monkeypatch, "--help") == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert max(map(len, shown)) <= 40


def test_without_a_command_the_help_is_shown_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("Usage: ")


def test_a_first_sentence() -> None:
    assert first_sentence("Do it. At once. Example: dpfed do") == "Do it"
    assert (
        first_sentence("Do it: well\nand fast. Example: dpfed do\n\nMore.")
        == "Do it: well and fast"
    )


@each
def test_every_help_has_an_example_that_parses(path: tuple[str, ...]) -> None:
    found = re.search(r"Example: (dpfed .*)", help_of(path))
    assert found, (
        f"the help of dpfed {' '.join(path)} has no line `Example: dpfed {' '.join(path)} ...`"
    )
    words = shlex.split(found.group(1))
    assert tuple(words[1 : len(path) + 1]) == path
    refused = ""
    try:
        COMMANDS[path].make_context("dpfed", words[len(path) + 1 :])
    except click.BadParameter as error:
        refused = error.message
    # The example may name a folder that only its reader has.
    assert not refused or "does not exist" in refused


@each
def test_every_option_and_argument_has_a_sentence(path: tuple[str, ...]) -> None:
    # Restores the help texts of arguments, as a call does.
    SCREEN.get_command(click.Context(SCREEN), path[0])  # type: ignore[attr-defined]
    for param in COMMANDS[path].params:
        assert getattr(param, "help", None), f"dpfed {' '.join(path)}: {param.name}"


@each
def test_the_help_of_a_command_is_shown(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, *path, "--help") == 0
    assert "Example:" in capsys.readouterr().out


@each
def test_help_shows_every_word_of_its_texts(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    assert called(monkeypatch, *path, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for param in COMMANDS[path].params:
        text = " ".join((getattr(param, "help", None) or "").split())
        assert text in shown, f"dpfed {' '.join(path)} --help cuts the text of {param.name}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["serve"], "dpfed: there is no command 'serve', did you mean server?"),
        (["expor"], "dpfed: there is no command 'expor', did you mean export?"),
        (["model", "descibe"], "dpfed: there is no command 'descibe', did you mean describe?"),
        (["zzz"], "dpfed: there is no command 'zzz'."),
    ],
)
def test_a_wrong_command_gets_one_suggestion(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert called(monkeypatch, *words) == 2
    assert capsys.readouterr().err == f"{sentence}\n"


def test_the_version_has_one_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", dpfed.__version__)
    assert called(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"dpfed {dpfed.__version__}\n"
    assert 'path = "src/dpfed/__init__.py"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {dpfed.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## \[{re.escape(dpfed.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("dpfed pri", {"privacy"}),
        ("dpfed run --res", {"--resume"}),
        ("dpfed list pre", {"presets"}),
    ],
)
def test_the_shell_completes(words: str, wanted: set[str]) -> None:
    ask = {
        "_DPFED_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; sys.argv = ['dpfed']; from dpfed.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ask},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(done.stdout.split()) == wanted


def test_the_script_for_completion_can_be_shown() -> None:
    env = {**os.environ, "_DPFED_COMPLETE": "source_bash"}
    code = "import sys; sys.argv = ['dpfed']; from dpfed.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert "complete -o default -F" in done.stdout


ENDS: dict[int, BaseException | None] = {
    0: None,
    1: ZeroDivisionError("a defect"),
    2: DpfedError("a mistake"),
    3: StoppedError("stopped"),
    130: KeyboardInterrupt(),
    143: InterruptedRunError("SIGTERM", 15),
}


@pytest.mark.parametrize("code", ENDS)
def test_exit_codes(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(**ignored: object) -> None:
        error = ENDS[code]
        if error is not None:
            raise error

    monkeypatch.setattr(cli, "app", end)
    # Python itself prints the traceback of a defect and exits with 1.
    if code == 1:
        with pytest.raises(ZeroDivisionError):
            cli.main()
        return
    assert called(monkeypatch) == code
    assert len(capsys.readouterr().err.splitlines()) == (0 if code == 0 else 1)


def test_an_audit_that_disproves_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import dpfed.privacy.auditing.report as report

    monkeypatch.setattr(report, "disproofs", lambda *found: iter(["made up for this test"]))
    small = ["--set", "model.name=linear", "--set", "run.rounds=1", "--set", "run.local_steps=1"]
    assert called(monkeypatch, "audit", *small, "--canaries", "40") == 4
    assert "made up for this test" in capsys.readouterr().out


def test_the_documented_exit_codes_are_these() -> None:
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)} == {*ENDS, 4}

"""The systemd units start commands of dpfed with options that exist."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import pytest
import typer

from dpfed.cli.main import app

UNITS = sorted((Path(__file__).parents[3] / "examples" / "systemd").glob("*.service"))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_of_dpfed(path: Path) -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    program, command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "dpfed"
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {option for parameter in commands[command].params for option in parameter.opts}
    given = {word for word in words if word.startswith("--")}
    assert given <= known
    folder = unit["Service"]["WorkingDirectory"]
    assert unit["Service"]["ReadWritePaths"] == folder


def test_there_is_a_unit_for_each_side() -> None:
    assert [path.stem for path in UNITS] == ["dpfed-client", "dpfed-server"]

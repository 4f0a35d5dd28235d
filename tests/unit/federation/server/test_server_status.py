"""The status of a federation: who is connected, round, score, epsilon and refusals."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.errors import DpfedError
from dpfed.federation.log_line import LogLine
from dpfed.federation.server import status as module
from dpfed.federation.server.log_display import JsonDisplay
from dpfed.federation.server.status import Status, lines, read_status, status_file
from dpfed.training.rounds import Round


def status_of(tmp_path: Path, **more: Any) -> tuple[Status, list[str]]:
    log: list[str] = []
    return Status(status_file(tmp_path / "run"), ["ada", "bob"], log.append, **more), log


def found(tmp_path: Path) -> dict[str, Any]:
    read = read_status(tmp_path / "run")
    assert read is not None
    return read


def job_of(causal: bool) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(task=SimpleNamespace(name="causal" if causal else "classify")),
        config=SimpleNamespace(run=SimpleNamespace(rounds=9)),
    )


def round_of(t: int) -> Round:
    return Round(t, 0.5, 2.0, 1.25, 2, 2, 1.0, 3.0, torch.zeros(1))


def left_out(t: int, name: str, reason: str) -> LogLine:
    text = f"round {t}: client {name!r} is left out: {reason}"
    return LogLine(text, "left_out", round=t, client=name, reason=reason)


def test_the_file_says_who_is_connected_and_who_was_refused(tmp_path: Path) -> None:
    status, log = status_of(tmp_path)
    status.on_start(job_of(causal=False))
    status.seen(["ada"])
    status.on_round(round_of(1))
    status.say(left_out(2, "bob", "refused: sigma"))
    status.say("a plain line")
    read = found(tmp_path)
    assert stat.S_IMODE(status_file(tmp_path / "run").stat().st_mode) == 0o600
    assert (read["state"], read["round"], read["rounds"], read["accuracy"]) == (
        "training",
        1,
        9,
        0.5,
    )
    assert read["epsilon"] == {"server": 1.25, "third_party": 1.25}
    assert read["clients"]["ada"]["connected"]
    assert not read["clients"]["bob"]["connected"]
    assert read["clients"]["bob"]["refusals"] == 1
    text = "\n".join(lines(read))
    assert "training, round 1 of 9, accuracy 0.500, epsilon 1.25 for the server" in text
    assert "bob                  has not connected, left out 1 times" in text
    assert "round 2: bob was left out: refused: sigma" in text
    assert [str(line) for line in log] == [
        "round 2: client 'bob' is left out: refused: sigma",
        "a plain line",
    ]
    status.seen(["bob"])
    assert "ada                  away since" in "\n".join(lines(found(tmp_path)))


def test_a_language_model_has_a_perplexity(tmp_path: Path) -> None:
    status, _ = status_of(tmp_path)
    status.on_start(job_of(causal=True))
    status.on_round(round_of(1))
    assert "accuracy" not in found(tmp_path)
    assert "perplexity 7.389" in next(lines(found(tmp_path)))


@pytest.mark.parametrize(("ends", "state"), [(True, "finished"), (False, "stopped")])
def test_the_end_of_a_server_is_noted(tmp_path: Path, ends: bool, state: str) -> None:
    status, _ = status_of(tmp_path)
    status.on_start(job_of(causal=False))
    if ends:
        status.on_end({})
    status.close()
    assert found(tmp_path)["state"] == state


def test_a_killed_server_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _ = status_of(tmp_path)
    status.seen([])
    assert found(tmp_path)["state"] == "waiting"

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    assert found(tmp_path)["state"] == "killed"


def test_news_of_the_guard_go_to_the_log_and_old_refusals_are_dropped(tmp_path: Path) -> None:
    status, log = status_of(tmp_path, news=lambda: ["a wrong key"])
    status.seen([])
    assert log == ["a wrong key"]
    for t in range(module.KEPT + 5):
        status.say(left_out(t, "bob", "away"))
    read = found(tmp_path)
    assert len(read["refusals"]) == module.KEPT
    assert read["refusals"][-1]["round"] == module.KEPT + 4
    assert read["clients"]["bob"]["refusals"] == module.KEPT + 5


def test_the_command_shows_the_status(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    missing = CliRunner().invoke(app, ["server", "--status", "--out", out])
    assert isinstance(missing.exception, DpfedError)
    assert "not the folder of a run" in str(missing.exception)
    status, _ = status_of(tmp_path)
    status.on_start(job_of(causal=False))
    shown = CliRunner().invoke(app, ["server", "--status", "--out", out, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout.splitlines()[-1])["rounds"] == 9
    status_file(tmp_path / "run").write_text("{")
    broken = CliRunner().invoke(app, ["server", "--status", "--out", out])
    assert "cannot be read" in str(broken.exception)


def test_a_log_in_json_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonDisplay(9) as display:
        display.say("plain", left_out(2, "bob", "away"))
        display.on_round(round_of(1))
    plain, refused, round = map(json.loads, capsys.readouterr().err.splitlines())
    assert (plain["event"], plain["message"]) == ("note", "plain")
    assert (refused["event"], refused["client"], refused["reason"]) == ("left_out", "bob", "away")
    assert (round["event"], round["round"], round["accuracy"], round["perplexity"]) == (
        "round",
        1,
        0.5,
        None,
    )
    assert "time" in round

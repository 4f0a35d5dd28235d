"""Progress on a plain log: lines only after silence, and none on stdout."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command import dpfed

import dpfed as library
from dpfed.training.callbacks import progress
from dpfed.training.callbacks.activity import Activity
from dpfed.training.callbacks.bars import NotebookBar, TerminalBar, in_notebook
from dpfed.training.callbacks.progress import ProgressDisplay
from dpfed.training.rounds import Round


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_log_gets_a_line_only_after_silence(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ProgressDisplay(5, clock=clock) as watch:
        for second in range(25):
            clock.now = 100.0 + second
            watch.on_activity(Activity("local steps", second, 25, 1))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["round 1/5  local steps 10 of 25", "round 1/5  local steps 20 of 25"]


def test_any_other_line_restarts_the_silence(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ProgressDisplay(5, clock=clock) as watch:
        clock.now += progress.SILENCE_S
        watch.say("something else")
        watch.on_activity(Activity("features of records", 1000, 12000))
        clock.now += progress.SILENCE_S
        watch.on_activity(Activity("features of records", 2000, 12000))
    assert capsys.readouterr().err.splitlines() == [
        "something else",
        "features of records 2,000 of 12,000",
    ]


def test_activity_goes_to_stderr_and_not_to_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    keys = ("--set", "run.rounds=1", "--set", "model.name=linear", "--set", "run.local_steps=2")
    assert dpfed("run", *keys, "--out", str(tmp_path / "run"), "--json") == 0
    said = capsys.readouterr()
    assert "round 1/1  local steps 10 of 20" in said.err
    assert "local steps 10 of 20" not in said.out
    assert json.loads(said.out.splitlines()[-1])["rounds"] == 1


def test_python_shows_activity_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    features = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(int)
    train, test = (
        {"features": features[part], "label": labels[part]}
        for part in (slice(0, 60), slice(60, None))
    )
    short = {"run.rounds": 1, "run.local_steps": 2}
    library.fine_tune("linear", train, test, clients=2, settings=short, out=tmp_path / "run")
    assert "round 1/1  local steps 2 of 4" in capsys.readouterr().err


def test_a_bar_shows_the_score_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, the bar has a task of its own, which is not the task of the model."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("dpfed.training.callbacks.progress.summary", lambda job: [])
    model = SimpleNamespace(task=SimpleNamespace(name="regress"))
    shown = ProgressDisplay(1)
    assert isinstance(shown._bar, TerminalBar)
    with shown:
        shown.on_start(SimpleNamespace(model=model, notes=[], warnings=[]))  # type: ignore[arg-type]
        shown.on_round(Round(1, None, 0.5, 2.0, 1, 1, 0.1, 1.0, torch.zeros(1), r2=0.25))
    assert shown._bar.progress.tasks[0].fields["score"] == "R2 0.250"


def test_a_notebook_has_one_bar_that_ends_with_the_last_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr("dpfed.training.callbacks.progress.summary", lambda job: ["the plan"])
    model = SimpleNamespace(task=SimpleNamespace(name="classify"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ProgressDisplay(2) as shown:
            shown.on_start(SimpleNamespace(model=model, notes=[], warnings=[]))  # type: ignore[arg-type]
            for t in (1, 2):
                shown.on_round(Round(t, 0.8, 0.5, 2.0, 1, 1, 0.1, 1.0, torch.zeros(1)))
    assert isinstance(shown._bar, NotebookBar)
    text = capsys.readouterr().err
    assert "the plan" in text
    assert "2/2" in text.rsplit("\r", 1)[-1]
    assert "accuracy 0.800" in text.rsplit("\r", 1)[-1]
    assert "epsilon 2.00" in text.rsplit("\r", 1)[-1]


def test_other_shells_have_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("TerminalInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    assert not in_notebook()

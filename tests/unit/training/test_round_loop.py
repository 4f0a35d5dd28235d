"""Overlapped rounds, which are reported one round later, equal rounds without overlap."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import server_state_case
import torch
from callback_case import Watcher
from torch import Tensor

from dpfed.config import Config
from dpfed.errors import DivergedError, InterruptedRunError
from dpfed.registry import registry
from dpfed.training import open_run, round_loop
from dpfed.training.backends.execution import InProcess
from dpfed.training.backends.finite_check import begin_finite_check
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.spending import Spending
from dpfed.training.callbacks.checkpoints import checkpoints_due
from dpfed.training.job.job import Job, prepare
from dpfed.training.open_run import Mode
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import RoundLoop
from dpfed.training.rounds import Progress, Round
from dpfed.training.run import run
from dpfed.training.server_state import State


def config_of(**run: Any) -> Config:
    return server_state_case.config_of(**{"rounds": 6, "eval_every": 4, **run})


class RecordedLoop:
    """A round loop that records cohorts, reported rounds and checkpoints in order."""

    def __init__(self, job: Job, overlapped: bool, due: Any = lambda t: False) -> None:
        self.events: list[str] = []
        self.rounds: list[Round] = []
        recorded = self

        class Watched(Fleet):
            def run_cohort(self, t: int, *rest: Any, **more: Any) -> Any:
                recorded.events.append(f"cohort {t}")
                return super().run_cohort(t, *rest, **more)

        def observe(round: Round) -> None:
            recorded.events.append(f"reported {round.t}")
            recorded.rounds.append(round)

        def keep(progress: Progress) -> None:
            recorded.events.append(f"saved {progress.t}")

        def call(stop: Callable[[], None] = lambda: None) -> Tensor:
            fleet = Watched(job, check_messages=not overlapped)
            watcher = Watcher(on_round=observe, on_checkpoint=keep)
            spending = Spending(job, None, None)
            return RoundLoop(job, fleet, spending, watcher, stop, due, overlap=overlapped).run()

        self.call = call


def test_overlap_does_not_change_rounds() -> None:
    job = prepare(config_of())
    direct, overlapped = (
        RecordedLoop(job, False, lambda t: t == 2),
        RecordedLoop(job, True, lambda t: t == 2),
    )
    assert torch.equal(direct.call(), overlapped.call())
    assert direct.events == [
        "reported 0", "cohort 1", "reported 1", "cohort 2", "reported 2", "saved 2",
        "cohort 3", "reported 3", "cohort 4", "reported 4",
        "cohort 5", "reported 5", "cohort 6", "reported 6",
    ]  # fmt: skip
    # Round 2 has a checkpoint and rounds 4 and 6 are scored, so they are reported at once.
    assert overlapped.events == [
        "reported 0", "cohort 1", "cohort 2", "reported 1", "reported 2", "saved 2",
        "cohort 3", "cohort 4", "reported 3", "reported 4",
        "cohort 5", "cohort 6", "reported 5", "reported 6",
    ]  # fmt: skip
    for one, other in zip(direct.rounds, overlapped.rounds, strict=True):
        assert torch.equal(one.theta, other.theta)
        strip = {"theta": torch.zeros(1), "seconds": 0.0}
        assert repr(replace(one, **strip)) == repr(replace(other, **strip))
    assert [round.accuracy is None for round in overlapped.rounds] == [
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("bad", [1, 3, 4, 6])
def test_a_non_finite_round_is_never_reported(
    bad: int, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(config_of())
    right = round_loop.aggregate

    def broken(job: Any, t: int, *rest: Any) -> State:
        state = right(job, t, *rest)
        return (
            state
            if t != bad
            else replace(state, server=replace(state.server, theta=state.theta / 0))
        )

    monkeypatch.setattr(round_loop, "aggregate", broken)
    recorded = RecordedLoop(job, overlapped)
    with pytest.raises(
        DivergedError, match=f"after round {bad} the server's theta is no longer finite"
    ):
        recorded.call()
    assert [round.t for round in recorded.rounds] == list(range(bad))
    assert all(round.theta.isfinite().all() for round in recorded.rounds)


def test_an_interruption_reports_completed_rounds() -> None:
    job, calls = prepare(config_of()), iter(range(100))

    def stop() -> None:
        # This call comes before round 4.
        if next(calls) == 3:
            raise InterruptedRunError("SIGTERM", 15)

    recorded = RecordedLoop(job, True)
    with pytest.raises(InterruptedRunError):
        recorded.call(stop)
    assert recorded.events[-3:] == ["cohort 3", "reported 2", "reported 3"]


def test_the_finite_check_finds_nan_and_infinity() -> None:
    state = first_state(prepare(config_of()))
    begin_finite_check(state, 7)()
    for value in (float("nan"), float("inf")):
        theta = state.theta.clone()
        theta[3] = value
        answer = begin_finite_check(replace(state, server=replace(state.server, theta=theta)), 7)
        with pytest.raises(DivergedError, match="after round 7"):
            answer()


def times(job: Any, seconds: list[float]) -> list[int]:
    clock = iter([0.0, *seconds])
    due = checkpoints_due(job, lambda: next(clock))
    return [t for t in range(1, len(seconds) + 1) if due(t)]


def test_rounds_with_a_checkpoint() -> None:
    def job(device: str, **run: Any) -> Any:
        return SimpleNamespace(device=torch.device(device), config=config_of(**run), served=False)

    seconds = [0.2, 0.9, 1.1, 1.9, 2.05, 2.2]
    # Due one second after the last checkpoint, and after the last round.
    assert times(job("cuda"), seconds) == [3, 6]
    assert times(job("cuda"), [0.2, 0.9, 1.1, 1.9, 2.3, 2.4]) == [3, 5, 6]
    assert times(job("cpu"), seconds) == [1, 2, 3, 4, 5, 6]
    assert times(job("cuda", noise="os"), seconds) == [1, 2, 3, 4, 5, 6]
    assert times(job("cuda", checkpoint_every=4), seconds) == [4]
    assert times(job("cuda", checkpoint_every=0), seconds) == []


def test_a_run_with_few_checkpoints_resumes_with_equal_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after round 5 and has one checkpoint, after round 2."""

    def go(out: Path, mode: Mode = "new", crash: int = 99) -> list[str]:
        def observe(round: Round) -> None:
            if round.t == crash:
                raise KeyboardInterrupt

        run(config_of(), out, mode, callbacks=[Watcher(on_round=observe)])
        return [
            line.split('"seconds"')[0] for line in (out / "metrics.jsonl").read_text().splitlines()
        ]

    whole = go(tmp_path / "whole")
    monkeypatch.setattr(open_run, "checkpoints_due", lambda job: lambda t: t == 2)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", crash=5)
    assert go(tmp_path / "cut", mode="resume") == whole
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


@pytest.mark.parametrize("method", ["dp-fedadamw", "dp-scaffold"])
def test_a_run_with_overlap_equals_a_run_without(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, epsilons and model are equal with overlap, also after an interruption."""
    config = replace(config_of(), algorithm=registry().algorithm[method](lr=0.05))
    files: list[tuple[Any, ...]] = []

    def files_of(out: Path) -> tuple[Any, ...]:
        lines = [
            line.split('"seconds"')[0] for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        figures = json.loads((out / "run.json").read_text())["epsilon"]
        return lines, figures, (out / "model.safetensors").read_bytes()

    run(config, tmp_path / "direct")
    files.append(files_of(tmp_path / "direct"))
    monkeypatch.setattr(open_run, "may_overlap", lambda job: True)
    monkeypatch.setattr(open_run, "checkpoints_due", lambda job: lambda t: t in (2, 6))
    run(config, tmp_path / "overlapped")
    files.append(files_of(tmp_path / "overlapped"))
    steps = iter(range(100))

    def stop() -> None:
        # This step is in a round that is not reported yet.
        if next(steps) == 11:
            raise InterruptedRunError("SIGTERM", 15)

    with pytest.raises(InterruptedRunError):
        run(config, tmp_path / "cut", execution=InProcess(stop))
    run(config, tmp_path / "cut", mode="resume")
    files.append(files_of(tmp_path / "cut"))
    assert files[0] == files[1] == files[2]

"""Rounds that are told of late, as on a GPU: the same rounds, in the same order, and never one that is not finite."""

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


class Told:
    """What was said, in order: cohorts that were asked for, rounds that were told of, progress that was kept."""

    def __init__(self, job: Job, late: bool, due: Any = lambda t: False) -> None:
        self.words: list[str] = []
        self.rounds: list[Round] = []
        told = self

        class Watched(Fleet):
            def run_cohort(self, t: int, *rest: Any, **more: Any) -> Any:
                told.words.append(f"cohort {t}")
                return super().run_cohort(t, *rest, **more)

        def observe(round: Round) -> None:
            told.words.append(f"told {round.t}")
            told.rounds.append(round)

        def keep(progress: Progress) -> None:
            told.words.append(f"kept {progress.t}")

        def call(stop: Callable[[], None] = lambda: None) -> Tensor:
            fleet = Watched(job, check_messages=not late)
            watcher = Watcher(on_round=observe, on_checkpoint=keep)
            spending = Spending(job, None, None)
            return RoundLoop(job, fleet, spending, watcher, stop, due, overlap=late).run()

        self.call = call


def test_the_same_rounds_one_later() -> None:
    job = prepare(config_of())
    prompt, late = Told(job, False, lambda t: t == 2), Told(job, True, lambda t: t == 2)
    assert torch.equal(prompt.call(), late.call())
    assert prompt.words == [
        "told 0", "cohort 1", "told 1", "cohort 2", "told 2", "kept 2", "cohort 3", "told 3", "cohort 4", "told 4",
        "cohort 5", "told 5", "cohort 6", "told 6",
    ]  # fmt: skip
    assert late.words == [  # rounds 2 (due), 4 and 6 (scored) are told of at once
        "told 0", "cohort 1", "cohort 2", "told 1", "told 2", "kept 2", "cohort 3", "cohort 4", "told 3", "told 4",
        "cohort 5", "cohort 6", "told 5", "told 6",
    ]  # fmt: skip
    for one, other in zip(prompt.rounds, late.rounds, strict=True):
        assert torch.equal(one.theta, other.theta)
        strip = {"theta": torch.zeros(1), "seconds": 0.0}
        assert repr(replace(one, **strip)) == repr(replace(other, **strip))
    assert [round.accuracy is None for round in late.rounds] == [
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bad", [1, 3, 4, 6])
def test_a_round_that_is_not_finite_is_never_told_of(
    bad: int, late: bool, monkeypatch: pytest.MonkeyPatch
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
    told = Told(job, late)
    with pytest.raises(
        DivergedError, match=f"after round {bad} the server's theta is no longer finite"
    ):
        told.call()
    assert [round.t for round in told.rounds] == list(range(bad))
    assert all(round.theta.isfinite().all() for round in told.rounds)


def test_an_interruption_tells_of_what_is_over() -> None:
    job, calls = prepare(config_of()), iter(range(100))

    def stop() -> None:
        if next(calls) == 3:  # before round 4
            raise InterruptedRunError("SIGTERM", 15)

    told = Told(job, True)
    with pytest.raises(InterruptedRunError):
        told.call(stop)
    assert told.words[-3:] == ["cohort 3", "told 2", "told 3"]


def test_finite_by_hand() -> None:
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


def test_when_checkpoints_are_due() -> None:
    def job(device: str, **run: Any) -> Any:
        return SimpleNamespace(device=torch.device(device), config=config_of(**run), served=False)

    seconds = [0.2, 0.9, 1.1, 1.9, 2.05, 2.2]
    assert times(job("cuda"), seconds) == [
        3,
        6,
    ]  # a second after the last, and after the last round
    assert times(job("cuda"), [0.2, 0.9, 1.1, 1.9, 2.3, 2.4]) == [3, 5, 6]
    assert times(job("cpu"), seconds) == [1, 2, 3, 4, 5, 6]
    assert times(job("cuda", noise="os"), seconds) == [1, 2, 3, 4, 5, 6]
    assert times(job("cuda", checkpoint_every=4), seconds) == [4]
    assert times(job("cuda", checkpoint_every=0), seconds) == []


def test_a_whole_run_with_few_checkpoints_goes_on_as_if_there_were_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after round 5 with a checkpoint after round 2 only."""

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
def test_a_late_run_is_the_prompt_one(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of `run`, as on a GPU but for the device: the same metrics, charges and model; interrupted and resumed too."""
    config = replace(config_of(), algorithm=registry().algorithm[method](lr=0.05))
    files: list[tuple[Any, ...]] = []

    def kept(out: Path) -> tuple[Any, ...]:
        lines = [
            line.split('"seconds"')[0] for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        figures = json.loads((out / "run.json").read_text())["epsilon"]
        return lines, figures, (out / "model.safetensors").read_bytes()

    run(config, tmp_path / "prompt")
    files.append(kept(tmp_path / "prompt"))
    monkeypatch.setattr(open_run, "may_overlap", lambda job: True)
    monkeypatch.setattr(open_run, "checkpoints_due", lambda job: lambda t: t in (2, 6))
    run(config, tmp_path / "late")
    files.append(kept(tmp_path / "late"))
    steps = iter(range(100))

    def stop() -> None:
        if next(steps) == 11:  # within a round that nobody was told of
            raise InterruptedRunError("SIGTERM", 15)

    with pytest.raises(InterruptedRunError):
        run(config, tmp_path / "cut", execution=InProcess(stop))
    run(config, tmp_path / "cut", mode="resume")
    files.append(kept(tmp_path / "cut"))
    assert files[0] == files[1] == files[2]

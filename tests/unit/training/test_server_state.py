"""The average of the server's iterates equals values by hand; a run scores and saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_case import Watcher
from safetensors.torch import load_file
from server_state_case import config_of
from torch import Tensor

import dpfed
from dpfed.algorithms.base import Point
from dpfed.config import Config
from dpfed.errors import DivergedError, DpfedError
from dpfed.training import round_loop
from dpfed.training.backends.base import LostRoundError
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.spending import Spending
from dpfed.training.callbacks.base import Callback
from dpfed.training.evaluation import evaluate
from dpfed.training.job.job import prepare
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import RoundLoop
from dpfed.training.rounds import Round
from dpfed.training.run import run
from dpfed.training.server_state import AVERAGE, State


def thetas(config: Config) -> list[Tensor]:
    """Return the iterates of a run without an average."""
    seen: list[Round] = []
    job = prepare(config)
    RoundLoop(job, Fleet(job), Spending(job, None, None), Watcher(on_round=seen.append)).run()
    return [round.theta for round in seen]


def test_the_average_equals_values_by_hand() -> None:
    state = State(Point(torch.tensor([8.0])), 1.0).averaging()
    # Before the first round the average is the start.
    assert state.result.tolist() == [8.0]
    found = []
    for value in (1.0, 3.0, 5.0):
        state = state.after(Point(torch.tensor([value])), 1.0, 0.5)
        found.append(state.result.item())
    # The weights are 1; 1/3, 2/3; 1/7, 2/7, 4/7. The start has no weight.
    assert found == pytest.approx([1.0, 7 / 3, 27 / 7])
    assert state.theta.tolist() == [5.0]


def test_the_average_of_equal_iterates_is_exact() -> None:
    state = State(Point(torch.tensor([8.0])), 1.0).averaging()
    for _ in range(50):
        state = state.after(Point(torch.tensor([0.1, -3e4])), 1.0, 0.999)
        torch.testing.assert_close(state.result, torch.tensor([0.1, -3e4]), rtol=1e-5, atol=0)


def test_without_an_average_the_state_has_none() -> None:
    state = first_state(prepare(config_of()))
    assert state.average is None
    assert AVERAGE not in state.tensors()
    assert state.result is state.theta


def test_the_average_is_scored_and_saved_but_not_sent_to_clients(
    tmp_path: Path,
) -> None:
    config = config_of(average=0.6)
    plain = thetas(config_of())
    expected, weight = torch.zeros_like(plain[0]), 0.0
    for theta in plain[1:]:
        expected, weight = 0.6 * expected + 0.4 * theta, 0.6 * weight + 0.4
    expected = expected / weight
    result = run(config, tmp_path / "r")
    job = prepare(config)
    saved = job.space.flatten(load_file(tmp_path / "r" / "model.safetensors"))
    torch.testing.assert_close(saved, expected, rtol=1e-5, atol=1e-7)
    assert float((saved - plain[-1]).norm()) > 0.1 * float((plain[-1] - plain[0]).norm())
    scores = evaluate(job, saved)[0], evaluate(job, plain[-1])[0]
    assert scores[0] != scores[1]
    assert (result["test_accuracy"], result["last_accuracy"]) == scores
    assert result["metrics"]["accuracy"] == pytest.approx(scores[0])
    rows = [
        json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    ]
    # After one round the average is the last iterate.
    same = [row["accuracy"] == row.get("last_accuracy") for row in rows[:2]]
    assert same == [False, True]
    assert "last_accuracy" not in rows[0]
    assert (rows[-1]["accuracy"], rows[-1]["last_accuracy"]) == scores
    stored = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (stored["test_accuracy"], stored["last_accuracy"]) == scores


def test_a_run_killed_after_its_last_round_still_saves_the_average(tmp_path: Path) -> None:
    config, out = config_of(average=0.6), tmp_path / "r"
    result = run(config, out)
    before, stored = (
        load_file(out / "model.safetensors"),
        json.loads((out / "run.json").read_text()),
    )
    (out / "model.safetensors").unlink()
    (out / "run.json").write_text(
        json.dumps({"run": stored["run"], "state": "running", "release": stored["release"]})
    )
    again = run(config, out, mode="resume")
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [again[key] for key in ("test_accuracy", "last_accuracy")] == [
        result[key] for key in ("test_accuracy", "last_accuracy")
    ]


def test_the_average_does_not_change_epsilon(tmp_path: Path) -> None:
    one, two = (
        run(config_of(), tmp_path / "a"),
        run(config_of(average=0.9, eval_every=3), tmp_path / "b"),
    )
    assert one["epsilon"] == two["epsilon"]
    assert "last_accuracy" not in one
    rows = [
        json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["last_accuracy" in row for row in rows] == [False, False, False, True, True]


def test_a_lost_round_does_not_change_the_average() -> None:
    job, plain = prepare(config_of(average=0.5, rounds=3)), thetas(config_of(rounds=3))

    class Losing(Fleet):
        def run_cohort(self, t: int, *rest: Any, **more: Any) -> Any:
            if t < 3:
                raise LostRoundError("nobody answered")
            return super().run_cohort(t, *rest, **more)

    seen: list[Round] = []
    found = RoundLoop(
        job, Losing(job), Spending(job, None, None), Watcher(on_round=seen.append)
    ).run()
    assert torch.equal(seen[1].theta, plain[0])
    assert torch.equal(seen[2].theta, plain[0])
    assert not torch.equal(found, plain[0])
    torch.testing.assert_close(found, seen[3].theta, rtol=0, atol=0)
    # The average of one iterate is this iterate.
    assert seen[3].accuracy == seen[3].last_accuracy


def test_a_non_finite_average_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(config_of(average=0.5))
    right = round_loop.aggregate

    def broken(job: Any, t: int, *rest: Any) -> State:
        state = right(job, t, *rest)
        assert state.average is not None
        return State(state.server, state.clip, state.average / (2 - t), state.weight)

    monkeypatch.setattr(round_loop, "aggregate", broken)
    with pytest.raises(
        DivergedError, match=r"after round 2 the server's run\.average is no longer finite"
    ):
        RoundLoop(job, Fleet(job), Spending(job, None, None), Callback()).run()


def test_fine_tune_returns_the_score_of_the_last_iterate(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=g).numpy()
    private, public = (
        {"features": part, "label": (part[:, 0] > 0).astype(int)} for part in (x[:60], x[60:])
    )
    settings = {"run.average": 0.8, "run.rounds": 2, "run.local_steps": 1, "run.device": "cpu"}
    tuned = dpfed.fine_tune(
        "linear",
        private,
        public,
        clients=2,
        settings=settings,
        out=tmp_path / "r",
        progress=False,
        epsilon=8.0,
    )
    assert 0 <= tuned.result["last_accuracy"] <= 1


@pytest.mark.parametrize("value", [1.0, -0.1, float("nan")])
def test_invalid_weights_of_the_average_are_refused(value: float) -> None:
    with pytest.raises(DpfedError, match=r"run\.average = .* is not allowed"):
        config_of(average=value)

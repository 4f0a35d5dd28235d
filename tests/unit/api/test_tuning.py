"""`dpfed.tune`: every trial counts in epsilon."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

import dpfed
from dpfed.api.tuning import composed_epsilon, points_of, score_of
from dpfed.errors import DpfedError
from dpfed.training.budget.recorded_spending import read_recorded_spending

RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 2
TRAIN, TEST = (
    {"features": RNG.normal(size=(60, 3)) + 2 * LABELS[:, None], "label": LABELS} for _ in range(2)
)


def tuned(out: Path, space: dict[str, Any], **keys: Any) -> dpfed.Tuning:
    settings = {"run.local_steps": 2, "privacy.sigma": 30.0, **keys.pop("settings", {})}
    keys = {"epsilon": None, "rounds": 2, **keys}
    return dpfed.tune(
        "linear", TRAIN, TEST, space=space, clients=2, out=out, progress=False, settings=settings,
        **keys,
    )  # fmt: skip


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon of a Gaussian mechanism with sensitivity over noise `mu`, from its formula."""

    def excess(e: float) -> float:
        tail = norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2)
        return float(tail - delta)

    return float(brentq(excess, 0, 50))


def test_epsilon_is_that_of_one_gaussian_mechanism(tmp_path: Path) -> None:
    """With rate 1, trials of 4, 4, 8 and 8 steps are one Gaussian with mu = sqrt(24) / 30."""
    space = {"lr": [0.01, 0.1], "run.local_steps": [2, 4]}
    found = dpfed.tune(
        "linear", TRAIN, TEST, space=space, clients=2, out=tmp_path, progress=False, epsilon=None,
        rounds=2, settings={"privacy.rate": 1.0, "privacy.sigma": 30.0},
    )  # fmt: skip
    assert found.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(24) / 30, 1e-5), rel=1e-3)
    one = found.best.epsilon["server_worst"]
    assert one is not None
    assert one < found.epsilon
    assert found.trials["score"].max() == found.best.accuracy
    assert len(found.trials) == 4
    assert found.trials.loc[1, ["lr", "run.local_steps"]].tolist() == [0.01, 2]
    assert found.settings["lr"] in (0.01, 0.1)


def test_equal_trials_cost_what_the_command_line_says(tmp_path: Path) -> None:
    """Subsampled trials with equal mechanisms: `dpfed privacy --tuning-runs 2`."""
    found = tuned(tmp_path, {"lr": [0.01, 0.1]}, settings={"privacy.sigma": 2.0})
    planned = read_recorded_spending(tmp_path / "trial-1").planned
    assert found.epsilon == planned.tuned(2)
    assert composed_epsilon([tmp_path / "trial-1"]) == planned.server_worst


def test_earlier_spending_counts_once(tmp_path: Path) -> None:
    """Both trials start from a module that another run has trained at a cost: 12 steps in all."""
    settings = {"privacy.rate": 1.0, "privacy.sigma": 30.0, "run.local_steps": 2}
    keys = {"clients": 2, "rounds": 2, "epsilon": None, "progress": False, "settings": settings}
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    first = dpfed.fine_tune(net, TRAIN, TEST, out=tmp_path / "first", **keys)
    space = {"lr": [0.01, 0.1]}
    found = dpfed.tune(first.model, TRAIN, TEST, space=space, out=tmp_path / "search", **keys)
    assert found.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(12) / 30, 1e-5), rel=1e-3)


def test_a_stopped_trial_counts_and_the_same_call_continues(tmp_path: Path) -> None:
    """A rate that diverges is a row without score. Its rounds are spent."""
    space = {"lr": [0.05, 1e30]}
    found = tuned(tmp_path, space, algorithm="dp-fedavg", rounds=4)
    assert found.trials["score"].isna().tolist() == [False, True]
    assert found.settings == {"lr": 0.05}
    assert found.epsilon is not None
    assert found.epsilon > composed_epsilon([tmp_path / "trial-1"])
    stamp = (tmp_path / "trial-1" / "run.json").stat().st_mtime_ns
    assert tuned(tmp_path, {"lr": [0.05]}, algorithm="dp-fedavg", rounds=4).settings == {"lr": 0.05}
    assert (tmp_path / "trial-1" / "run.json").stat().st_mtime_ns == stamp


def test_trials_that_an_earlier_call_left_in_the_folder_count(tmp_path: Path) -> None:
    """A smaller space in the same folder has spent what the larger one spent."""
    every = tuned(tmp_path, {"lr": [0.01, 0.1]})
    fewer = tuned(tmp_path, {"lr": [0.01]})
    assert len(fewer.trials) == 1
    assert fewer.epsilon == every.epsilon


def test_each_different_start_counts(tmp_path: Path) -> None:
    """Two trials of 4 steps begin with two models of 4 steps each: 16 steps in all."""
    settings = {"privacy.rate": 1.0, "privacy.sigma": 30.0, "run.local_steps": 2}
    keys = {"clients": 2, "rounds": 2, "epsilon": None, "progress": False, "settings": settings}
    folders = []
    for name in ("first", "second"):
        start = dpfed.fine_tune("linear", TRAIN, TEST, out=tmp_path / f"run-{name}", **keys)
        folders.append(str(tmp_path / name))
        start.export(folders[-1])
    space = {"model.weights": folders}
    found = dpfed.tune("linear", TRAIN, TEST, space=space, out=tmp_path / "search", **keys)
    assert found.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(16) / 30, 1e-5), rel=1e-3)


def test_without_privacy_there_is_no_epsilon(tmp_path: Path) -> None:
    settings = {"privacy.enabled": False, "run.local_steps": 1}
    found = dpfed.tune(
        "linear", TRAIN, TEST, space={"lr": [0.1]}, clients=2, rounds=1, epsilon=None, out=tmp_path,
        progress=False, settings=settings,
    )  # fmt: skip
    assert found.epsilon is None


def test_points_are_all_combinations_or_a_fixed_draw() -> None:
    space = {"lr": [1, 2], "beta1": [3, 4]}
    every = points_of(space, None, {})
    assert every == [{"lr": a, "beta1": b} for a in (1, 2) for b in (3, 4)]
    drawn = points_of(space, 3, {})
    assert drawn == points_of(space, 3, {})
    assert len({tuple(point.items()) for point in drawn}) == 3


@pytest.mark.parametrize(
    ("space", "trials", "options", "sentence"),
    [
        ({}, None, {}, "^space must be a dictionary of lists"),
        ({"lr": 0.1}, None, {}, r"^space\['lr'\] must be a list of values, not 0.1"),
        ({"lr": []}, None, {}, r"^space\['lr'\] must be a list"),
        ({"lr": [1]}, 2, {}, "^trials = 2 must be a whole number from 1 to 1, the size"),
        ({"lr": [1]}, None, {"lr": 1}, "^lr is given, and space tries values of it"),
        ({"run.rounds": [1]}, None, {"settings": {"run.rounds": 2}}, r"^run\.rounds is given"),
        ({"data.unit_column": ["a", "b"]}, None, {}, r"^data\.unit_column must be the same"),
        ({"privacy.sampling": ["poisson"]}, None, {}, r"^privacy\.sampling must be the same"),
    ],
)
def test_mistakes_are_named(
    space: Any, trials: int | None, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DpfedError, match=sentence):
        points_of(space, trials, options)


def test_a_smaller_loss_is_a_better_score() -> None:
    results = [{"test_accuracy": 0.5, "metric": {"name": "loss", "value": v}} for v in (2.0, 1.0)]
    assert [score_of(result) for result in results] == [-2.0, -1.0]
    assert score_of({"test_accuracy": 0.5}) == 0.5

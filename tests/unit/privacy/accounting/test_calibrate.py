"""The noise that was asked for: never past the target, never more than a thousandth too much."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import LARGEST_SIGMA, calibrate_sigma, smallest_sigma
from dpfed.privacy.accounting.observers import Rounds, view_epsilon
from dpfed.privacy.mechanism import Mechanism

CIFAR = Mechanism("poisson", 0.016, 1.0)


@pytest.mark.parametrize(
    ("rounds", "target", "sigma"),
    [
        (100, 1, 2.796),
        (100, 2, 1.619),
        (100, 3, 1.234),
        (20, 1, 1.458),
        (20, 3, 0.841),
        (10, 2, 0.889),
    ],
)
def test_noise_levels_of_spec_6_4(rounds: int, target: float, sigma: float) -> None:
    found = calibrate_sigma(Rounds(CIFAR, 20, rounds), target, 1e-5)
    assert found == pytest.approx(sigma, rel=2e-3)


GRID = [
    ("server_worst", "poisson", 0.016, 20, 100, 1.0, 1.0, 1, 1),
    ("server_worst", "poisson", 0.3, 10, 10, 1.0, 8.0, 1, 1),
    ("server_worst", "poisson", 0.1, 60, 10, 0.5, 8.0, 2, 1),
    ("server_worst", "poisson", 16 / 98175, 20, 100, 1.0, 0.02, 1, 1),
    ("server_worst", "poisson", 0.25, 20, 100, 1.0, 0.1, 1, 1),
    ("server_expected", "poisson", 0.05, 5, 40, 0.26, 2.0, 1, 2),
    ("third_party", "poisson", 0.05, 5, 40, 0.26, 2.0, 1, 1),
    ("server_worst", "fixed_wor", 0.1, 10, 10, 1.0, 8.0, 1, 1),
]


@pytest.mark.parametrize(
    ("view", "sampling", "rate", "steps", "rounds", "part", "target", "batches", "releases"), GRID
)
def test_round_trip_never_overshoots_and_is_minimal(  # type: ignore[no-untyped-def]
    view, sampling, rate, steps, rounds, part, target, batches, releases
) -> None:
    def plan(noise: float) -> Rounds:
        return Rounds(Mechanism(sampling, rate, noise, batches, releases), steps, rounds, part)

    def spent(noise: float) -> float:
        return view_epsilon(view, plan(noise), 1e-5)

    sigma = calibrate_sigma(plan(0.0), target, 1e-5, view)
    assert spent(sigma) <= target
    assert spent(sigma * (1 - 1.001e-3)) > target


def test_a_poor_estimate_only_costs_time() -> None:
    calls = []

    def exact(sigma: float) -> float:
        calls.append(sigma)
        return 3.0 / sigma

    for wrong in (0.5, 0.97, 1.0, 1.02, 3.0):
        calls.clear()
        found = smallest_sigma(exact, 2.0, lambda sigma, wrong=wrong: wrong * 3.0 / sigma)  # type: ignore[misc]
        assert 1.5 <= found <= 1.5 * (1 + 1e-3)
        assert len(calls) <= 40


def test_a_floor_below_which_epsilon_cannot_go_is_named() -> None:
    def floor(sigma: float) -> float:
        return 0.7 + 1 / (1 + sigma) - 1 / (1 + LARGEST_SIGMA)

    with pytest.raises(
        DpfedError, match=r"smallest epsilon possible for this plan is 0\.700; take fewer rounds"
    ):
        smallest_sigma(floor, 0.5, floor)
    with pytest.raises(DpfedError, match=r"smallest epsilon possible for this plan is 0\.04"):
        calibrate_sigma(Rounds(Mechanism("poisson", 1.0, 1.0), 20, 1000), 0.01, 1e-5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"target_epsilon": 0.0}, "above 0"),
        ({"target_epsilon": -1.0}, "above 0"),
        ({"target_epsilon": math.inf}, "above 0"),
        ({"target_epsilon": math.nan}, "above 0"),
        ({"plan": Rounds(CIFAR, 20, 0)}, "without any local step"),
        ({"view": "nobody"}, "view"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(change: dict[str, Any], word: str) -> None:
    plan = Rounds(CIFAR, 20, 100)
    with pytest.raises(DpfedError, match=word) as caught:
        calibrate_sigma(**{"plan": plan, "target_epsilon": 1.0, "delta": 1e-5, **change})
    assert "\n" not in str(caught.value)

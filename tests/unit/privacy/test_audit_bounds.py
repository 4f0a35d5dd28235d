"""Statistics of the audit on mechanisms with known epsilon: valid, and sensitive to faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from dpfed.privacy.audit import (
    batch_law,
    many_draws_bound,
    noise_law,
    one_run_bound,
    one_run_epsilon,
    one_run_p_value,
)
from dpfed.privacy.mechanism import Mechanism

torch.set_num_threads(1)

CONFIDENCE = 0.999
DELTA = 1e-5


# --- the statistics ---


def test_p_value_without_delta_is_the_binomial_tail() -> None:
    assert one_run_p_value(100, 100, 80, 1.0, 0.0) == pytest.approx(
        stats.binom.sf(79, 100, math.e / (1 + math.e)), rel=1e-12
    )
    # At epsilon 0 all of 20 right: a coin 20 times. One of one with delta: 1/2 + 2*m*delta*1/2.
    assert one_run_p_value(20, 20, 20, 0.0, 0.0) == pytest.approx(2.0**-20)
    assert one_run_p_value(10, 1, 1, 0.0, 1e-3) == pytest.approx(0.5 + 20 * 1e-3 * 0.5)
    assert one_run_p_value(10, 5, 0, 3.0, 1e-5) == 1.0


def test_p_value_of_delta_by_hand() -> None:
    """With r = 3, v = 2, accuracy 1/2: P[W = 1] is 3/8 and P[W = 0] is 1/8."""
    expected = 4 / 8 + 2 * 7 * 1e-3 * max(3 / 8, (3 / 8 + 1 / 8) / 2)
    assert one_run_p_value(7, 3, 2, 0.0, 1e-3) == pytest.approx(expected)


def test_p_value_falls_with_correct_guesses_and_the_bound_grows() -> None:
    values = [one_run_p_value(200, 100, v, 1.0, 1e-5) for v in range(101)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(values))
    bounds = [one_run_epsilon(200, 100, v, 1e-5, 0.95) for v in range(101)]
    assert bounds == sorted(bounds)
    assert bounds[50] == 0.0
    assert (
        one_run_p_value(200, 100, 95, bounds[95], 1e-5)
        < 0.05
        <= one_run_p_value(200, 100, 95, bounds[95] + 2e-4, 1e-5)
    )


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be"):
        one_run_p_value(10, 5, 6, 1.0, 0.0)


def gaussian(epsilon: float, delta: float) -> float:
    """Return the noise at which N(0) and N(1) are exactly (epsilon, delta)-DP (Balle, Wang)."""
    low, high = 1e-2, 1e3
    for _ in range(100):
        s = math.sqrt(low * high)
        spent = stats.norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * stats.norm.cdf(
            -0.5 / s - epsilon * s
        )
        low, high = (s, high) if spent > delta else (low, s)
    return high


def randomized_response(epsilon: float, coins: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    honest = rng.random(coins.shape) < math.exp(epsilon) / (1 + math.exp(epsilon))
    return np.where(honest, coins, ~coins) * 2.0 - 1.0


Bound = Callable[[np.ndarray, np.ndarray, float, float], float]


@pytest.mark.parametrize("bound", [one_run_bound, many_draws_bound])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_bounds_hold_for_randomized_response(bound: Bound, epsilon: float) -> None:
    """The tightest pure-DP mechanism; at 90 % confidence 10 % of the bounds may be too large."""
    rng = np.random.default_rng(int(epsilon))
    found = []
    for _ in range(150):
        coins = rng.random(400) < 0.5
        found.append(bound(randomized_response(epsilon, coins, rng), coins, 0.0, 0.9))
    wrong = sum(b > epsilon for b in found)
    assert stats.binomtest(wrong, 150, 0.1, alternative="greater").pvalue > 1e-3
    # The bounds have power.
    assert epsilon == 0 or np.median(found) > 0.5 * epsilon


@pytest.mark.parametrize("bound", [one_run_bound, many_draws_bound])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_bounds_hold_for_the_gaussian(bound: Bound, epsilon: float) -> None:
    delta = 1e-3
    s = gaussian(epsilon, delta)
    rng = np.random.default_rng(int(10 * epsilon))
    found = []
    for _ in range(100):
        coins = rng.random(400) < 0.5
        # The log-likelihood ratio.
        scores = (coins + s * rng.standard_normal(400) - 0.5) / s**2
        found.append(bound(scores, coins, delta, 0.9))
    wrong = sum(b > epsilon for b in found)
    assert stats.binomtest(wrong, 100, 0.1, alternative="greater").pvalue > 1e-3
    # At a small epsilon 400 canaries show nothing.
    assert epsilon < 6 or np.median(found) > 0.2 * epsilon


def test_delta_is_not_taken_for_epsilon() -> None:
    """A mechanism that reveals everything with probability delta is (0, delta)-DP."""
    rng = np.random.default_rng(5)
    delta, wrong = 2e-3, 0
    for _ in range(150):
        coins = rng.random(1000) < 0.5
        scores = np.where(rng.random(1000) < delta, 100.0, 1e-3) * np.where(coins, 1, -1)
        noise = rng.random(1000) < 0.5
        scores = np.where(np.abs(scores) < 1, np.where(noise, 1e-3, -1e-3), scores)
        wrong += (
            max(
                one_run_bound(scores, coins, delta, 0.95),
                many_draws_bound(scores, coins, delta, 0.95),
            )
            > 0
        )
    assert wrong / 150 < 0.12


def test_values_that_reveal_the_coins_give_a_large_bound() -> None:
    coins = np.random.default_rng(0).random(2000) < 0.5
    scores = np.where(coins, 1.0, 0.0)
    assert many_draws_bound(scores, coins, DELTA, CONFIDENCE) > 4
    assert one_run_bound(scores, coins, 0.0, CONFIDENCE) > 4
    assert one_run_bound(scores, coins, DELTA, CONFIDENCE) > 2
    # Without a canary that is out nothing is shown.
    assert many_draws_bound(scores, np.ones(2000, bool), DELTA, CONFIDENCE) == 0.0


# --- the laws ---


def poisson(rng: np.random.Generator, q: float, shape: tuple[int, int, int]) -> np.ndarray:
    return rng.random(shape) < q


def fixed(rng: np.random.Generator, b: int, shape: tuple[int, int, int]) -> np.ndarray:
    return np.argsort(np.argsort(rng.random(shape), axis=2), axis=2) < b


@pytest.mark.parametrize("q", [0.02, 0.25, 1.0])
def test_true_batches_pass(q: float) -> None:
    shape = (8, 40, 64)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        assert batch_law(Mechanism("poisson", q, 1.0), poisson(rng, q, shape)).p_value > 1e-4
        b = max(1, round(q * 64))
        assert batch_law(Mechanism("fixed_wor", b / 64, 1.0), fixed(rng, b, shape)).p_value > 1e-4


def test_wrong_batches_fail() -> None:
    rng = np.random.default_rng(1)
    shape = (8, 40, 64)
    law = Mechanism("poisson", 0.25, 1.0)
    assert batch_law(law, fixed(rng, 16, shape)).broken
    assert batch_law(law, poisson(rng, 0.28, shape)).broken
    assert batch_law(law, np.repeat(poisson(rng, 0.25, (8, 20, 64)), 2, axis=1)).broken
    assert batch_law(law, np.repeat(poisson(rng, 0.25, (4, 40, 64)), 2, axis=0)).broken
    assert batch_law(Mechanism("fixed_wor", 0.25, 1.0), poisson(rng, 0.25, shape)).broken
    assert batch_law(
        Mechanism("fixed_wor", 0.25, 1.0), np.repeat(fixed(rng, 16, (8, 1, 64)), 40, axis=1)
    ).broken


def test_noise_law() -> None:
    rng = np.random.default_rng(2)
    assert min(noise_law(rng.standard_normal((8, 20, 16))).p_value for _ in range(100)) > 1e-4
    noise = rng.standard_normal((8, 20, 16))
    assert noise_law(noise * 1.2).broken
    assert noise_law(noise * 0.8).broken
    assert noise_law(noise + 0.2).broken
    assert noise_law(np.repeat(noise[:, ::2], 2, axis=1)).broken
    assert noise_law(np.repeat(noise[::2], 2, axis=0)).broken

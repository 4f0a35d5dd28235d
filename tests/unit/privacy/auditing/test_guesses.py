"""Bounds from guesses: valid on mechanisms with known epsilon, exact, and stronger than before."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy import optimize, special, stats

from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.auditing.guesses import (
    Curve,
    Least,
    accounted,
    approximate,
    counted_guesses,
    epsilon_bound,
    ladder_bound,
    log_ratio,
    refuted,
)
from dpfed.privacy.mechanism import Mechanism

CONFIDENCE = 0.999
DELTA = 1e-5


def gaussian_least(mu: float) -> Least:
    """Return the curve of N(0, 1) against N(mu, 1)."""
    return lambda probability: float(special.ndtr(special.ndtri(probability) - mu))


def gaussian_mu(at: float, delta: float) -> float:
    """Return mu for which N(0, 1) and N(mu, 1) are exactly (epsilon, delta)-DP (Balle, Wang)."""

    def excess(mu: float) -> float:
        upper = special.ndtr(mu / 2 - at / mu)
        return float(upper - math.exp(at) * special.ndtr(-mu / 2 - at / mu) - delta)

    return float(optimize.brentq(excess, 1e-3, 50))


# --- one curve ---


def test_a_curve_bounds_an_event_and_its_complement() -> None:
    curve = approximate(math.log(3), 0.01)
    assert curve.least(0.31) == pytest.approx(0.1)
    assert curve.least(0.9) == pytest.approx(0.69)
    assert curve.least(0.005) == 0.0
    assert approximate(0.0, 0.0).least(0.4) == pytest.approx(0.4)


@pytest.mark.parametrize(
    "mechanism",
    [Mechanism("poisson", 1.0, 2.0), Mechanism("poisson", 0.1, 1.5, releases=2)],
    ids=["Gaussian", "subsampled"],
)
def test_the_accounted_curve_is_never_above_the_likelihood_ratio_test(
    mechanism: Mechanism,
) -> None:
    """The best test of "in" against "out" reaches its own errors; the curve must allow them."""
    least = accounted([[(mechanism, 1)]])
    std = mechanism.effective_multiplier
    for cut in np.linspace(-6, 6, 40) * std:
        absent = float(special.ndtr(-cut / std))
        present = (1 - mechanism.rate) * absent
        present += mechanism.rate * float(special.ndtr((1 - cut) / std))
        for one, other in [(present, absent), (absent, present)]:
            assert least(one) <= other + 1e-9
            assert least(1 - one) <= 1 - other + 1e-9
    # Near the middle the curve is close to the best test.
    if mechanism.rate == 1:
        assert least(0.5) == pytest.approx(gaussian_least(1 / std)(0.5), rel=0.01)


def test_of_several_histories_the_least_private_one_counts() -> None:
    loud, quiet = Mechanism("poisson", 0.2, 1.0), Mechanism("poisson", 0.4, 5.0)
    both = accounted([[(loud, 10)], [(quiet, 10)]])
    for probability in (0.01, 0.3, 0.9):
        alone = accounted([[(loud, 10)]])(probability), accounted([[(quiet, 10)]])(probability)
        assert both(probability) == min(alone)


# --- the test of one number of guesses ---


def largest_probability(canaries: int, guesses: int, correct: int, curve: Curve) -> float:
    """Return the largest probability of `correct` or more right guesses, by linear programming.

    The constraints are those that docs/audit-bounds.md derives, for every number of right guesses.
    """
    j = np.arange(guesses + 1)
    rows, limits = [], []
    for k in range(1, guesses + 1):
        right = np.where(j >= k, j, 0) / canaries
        wrong = np.where(j >= k - 1, guesses - j, 0) / canaries
        for slope, offset in _lines(curve):
            rows.append(slope * right - wrong)
            limits.append(-offset)
    found = optimize.linprog(
        -(j >= correct).astype(float), np.array(rows), limits, np.ones((1, guesses + 1)), [1.0]
    )
    assert found.status == 0
    return float(-found.fun)


def _lines(curve: Curve) -> list[tuple[float, float]]:
    """Return slope and offset of the lines whose maximum is `curve.least`."""
    out = []
    for at, delta in zip(curve.epsilons, curve.deltas, strict=True):
        factor = math.exp(at)
        out += [(1 / factor, -delta / factor), (factor, 1 - delta - factor)]
    return out


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct"), [(12, 12, 9), (12, 6, 6), (30, 16, 13), (30, 30, 30)]
)
@pytest.mark.parametrize(
    "curve",
    [
        approximate(0.7, 0.0),
        approximate(1.0, 0.01),
        Curve(np.array([0.0, 0.5, 2.0]), np.array([0.3, 0.15, 0.01])),
    ],
    ids=["pure", "approximate", "three pairs"],
)
def test_the_recursion_solves_the_linear_program(
    canaries: int, guesses: int, correct: int, curve: Curve
) -> None:
    largest = largest_probability(canaries, guesses, correct, curve)
    assert not refuted(canaries, guesses, correct, curve.least, largest * 0.999)
    assert refuted(canaries, guesses, correct, curve.least, min(largest * 1.01, 0.9999))


@pytest.mark.parametrize("canaries", [20, 200, 1000])
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_the_gaussian_is_not_refuted_by_its_own_guesses(canaries: int, mu: float) -> None:
    """All guesses are right with probability Phi(mu/2), independently of one another."""
    accuracy = float(special.ndtr(mu / 2))
    for level in (0.5, 0.9, 0.999, 1 - 1e-6):
        correct = int(stats.binom.ppf(level, canaries, accuracy))
        tail = float(stats.binom.sf(correct - 1, canaries, accuracy))
        assert not refuted(canaries, canaries, correct, gaussian_least(mu), tail)
    # A much smaller mu is refuted.
    assert refuted(canaries, canaries, correct, gaussian_least(mu / 10), 0.05)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be"):
        refuted(10, 5, 6, approximate(1.0, 0.0).least, 0.05)


def test_more_correct_guesses_give_a_larger_bound() -> None:
    coins = np.arange(200) % 2 == 0
    bounds = []
    for wrong in (60, 40, 20, 0):
        scores = np.where(coins, 1.0, 0.0) + np.linspace(0, 0.5, 200)
        scores[:wrong] = 0.5 - scores[:wrong]
        bounds.append(epsilon_bound(scores, coins, DELTA, 0.95))
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0] + 1


def test_the_highest_and_the_lowest_scores_are_guessed() -> None:
    coins = np.array([True] * 32 + [False] * 32)
    scores = np.arange(64)[::-1].astype(float)
    assert counted_guesses(scores, coins) == [(2, 2), (8, 8), (32, 32)]
    assert counted_guesses(-scores, coins) == [(2, 0), (8, 0), (32, 0)]
    assert counted_guesses(scores[:2], coins[:2]) == [(2, 1)]


# --- whole bounds on mechanisms with known epsilon ---


def share_of_wrong(bounds: list[float], truth: float) -> float:
    """Return the p-value of the hypothesis that at most 10 % of the bounds exceed the truth."""
    wrong = sum(bound > truth for bound in bounds)
    found: float = stats.binomtest(wrong, len(bounds), 0.1, alternative="greater").pvalue
    return found


@pytest.mark.parametrize("at", [0.0, 1.0, 3.0])
def test_bounds_hold_for_randomized_response(at: float) -> None:
    """The tightest pure-DP mechanism; at 90 % confidence 10 % of the bounds may be too large."""
    rng = np.random.default_rng(int(at))
    found = []
    for _ in range(150):
        coins = rng.random(400) < 0.5
        honest = rng.random(400) < math.exp(at) / (1 + math.exp(at))
        scores = np.where(honest, coins, ~coins) * 2.0 - 1.0
        found.append(epsilon_bound(scores, coins, 0.0, 0.9))
    assert share_of_wrong(found, at) > 1e-3
    # The bounds have power.
    assert at == 0 or np.median(found) > 0.5 * at


@pytest.mark.parametrize("at", [0.5, 2.0, 6.0])
def test_bounds_hold_for_the_gaussian(at: float) -> None:
    delta = 1e-3
    mu = gaussian_mu(at, delta)
    rng = np.random.default_rng(int(10 * at))
    free, known = [], []
    for _ in range(100):
        coins = rng.random(400) < 0.5
        scores = mu * coins + rng.standard_normal(400)
        free.append(epsilon_bound(scores, coins, delta, 0.9))
        known.append(ladder_bound(scores, coins, lambda ratio: gaussian_least(mu * ratio), 0.9))
    assert share_of_wrong(free, at) > 1e-3
    assert share_of_wrong(known, 1.0) > 1e-3
    # At a small epsilon 400 canaries show nothing without the curve.
    assert at < 6 or np.median(free) > 0.25 * at
    assert at < 2 or np.median(known) > 0.4


def test_delta_is_not_taken_for_epsilon() -> None:
    """A mechanism that reveals everything with probability delta is (0, delta)-DP."""
    rng = np.random.default_rng(5)
    delta, wrong = 2e-3, 0
    for _ in range(150):
        coins = rng.random(1000) < 0.5
        revealed = rng.random(1000) < delta
        noise = rng.choice([-1e-3, 1e-3], 1000)
        scores = np.where(revealed, np.where(coins, 100.0, -100.0), noise)
        wrong += epsilon_bound(scores, coins, delta, 0.95) > 0
    assert wrong / 150 < 0.12


def test_values_that_reveal_the_coins_give_a_large_bound() -> None:
    coins = np.random.default_rng(0).random(2000) < 0.5
    scores = np.where(coins, 1.0, 0.0)
    assert epsilon_bound(scores, coins, 0.0, CONFIDENCE) > 4
    assert epsilon_bound(scores, coins, DELTA, CONFIDENCE) > 4
    assert ladder_bound(scores, coins, gaussian_least, CONFIDENCE) > 1.3
    assert ladder_bound(scores[::-1], coins, gaussian_least, CONFIDENCE) == 0


def test_no_bound_exceeds_epsilon_4_in_200_audits_of_the_subsampled_gaussian() -> None:
    """The mechanism of the digits example. The accounted curve gives the larger bound."""
    steps, canaries = 90, 1000
    mechanism = Mechanism("poisson", 0.1119, 1.4485)
    assert epsilon([(mechanism, steps)], DELTA) == pytest.approx(4.0, abs=0.01)
    curve_at = partial(_scaled, mechanism, steps)
    rng = np.random.default_rng(0)
    free, known = [], []
    for _ in range(200):
        coins = rng.random(canaries) < 0.5
        drawn = rng.random((steps, canaries)) < mechanism.rate
        shifts = drawn * coins + mechanism.noise_multiplier * rng.standard_normal(drawn.shape)
        scores = log_ratio(shifts, mechanism).sum(0)
        free.append(epsilon_bound(scores, coins, DELTA, CONFIDENCE))
        known.append(ladder_bound(scores, coins, curve_at, CONFIDENCE))
    assert max(free) <= 4.0
    assert max(known) < 1.0
    in_epsilon = epsilon([(_louder(mechanism, float(np.median(known))), steps)], DELTA)
    assert in_epsilon > 1.15 * np.median(free)


def _louder(mechanism: Mechanism, ratio: float) -> Mechanism:
    return Mechanism("poisson", mechanism.rate, mechanism.noise_multiplier / ratio)


def _scaled(mechanism: Mechanism, steps: int, ratio: float) -> Least:
    return accounted([((_louder(mechanism, ratio), steps),)])


@pytest.mark.parametrize("size", [1.0, 0.5])
def test_the_score_is_the_log_likelihood_ratio(size: float) -> None:
    for releases, sampling in [(1, "poisson"), (2, "poisson"), (1, "fixed_wor")]:
        mechanism = Mechanism(sampling, 0.3, 1.7, releases=releases)  # type: ignore[arg-type]
        law = stats.norm(0, 1.7 / math.sqrt(releases))
        for value in (-2.0, 0.1, 3.0):
            present = 0.7 * law.pdf(value) + 0.3 * law.pdf(value - size)
            opposite = 0.7 * law.pdf(value) + 0.3 * law.pdf(value + size)
            absent = law.pdf(value) if sampling == "poisson" else opposite
            score = log_ratio(np.array([value]), mechanism, size)[0]
            assert score == pytest.approx(math.log(present / absent))

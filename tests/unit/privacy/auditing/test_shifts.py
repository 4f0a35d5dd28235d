"""The bound of measured shifts: valid where its assumptions hold, and close to the truth."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.auditing.shifts import MAX_RATIO, Shifts, most_drawn, ratio_bound
from dpfed.privacy.mechanism import Mechanism

SIGMA = 1.4485
RATE = 0.1119
STEPS = 90


def audit_of(
    rng: np.random.Generator, shift: float = 1.0, noise: float = 1.0, canaries: int = 500
) -> Shifts:
    """Simulate present canaries of the subsampled Gaussian with these sizes of shift and noise."""
    chances = canaries * STEPS
    drawn = rng.binomial(chances, RATE)
    total = shift * drawn + noise * SIGMA * math.sqrt(chances) * rng.standard_normal()
    squares = noise**2 * rng.chisquare(chances)
    return Shifts(total, SIGMA**2 * chances, chances, RATE, chances, squares)


def epsilon_of(ratio: float) -> float:
    return epsilon([(Mechanism("poisson", RATE, SIGMA / ratio), STEPS)], 1e-5)


def test_200_audits_stay_below_epsilon_4_and_most_reach_half_of_it() -> None:
    rng = np.random.default_rng(0)
    ratios = [ratio_bound(audit_of(rng, canaries=2000), 0.999) for _ in range(200)]
    assert epsilon_of(1.0) == pytest.approx(4.0, abs=0.01)
    assert epsilon_of(max(ratios)) <= 4.0
    assert epsilon_of(float(np.quantile(ratios, 0.01))) >= 2.0


@pytest.mark.parametrize(("shift", "noise"), [(1.0, 1.0), (0.4, 1.3), (2.0, 0.5)])
def test_the_bound_holds_and_finds_faults_of_shift_and_noise(shift: float, noise: float) -> None:
    rng = np.random.default_rng(1)
    found = [ratio_bound(audit_of(rng, shift, noise, 1500), 0.9) for _ in range(300)]
    wrong = sum(ratio > shift / noise for ratio in found)
    assert stats.binomtest(wrong, 300, 0.1, alternative="greater").pvalue > 1e-3
    assert np.median(found) > 0.75 * shift / noise


def test_unequal_rates_and_draws_without_replacement_are_covered() -> None:
    """The number of drawn canaries exceeds the limit at most as often as stated."""
    rng = np.random.default_rng(2)
    rates = rng.uniform(0.01, 0.5, 200)
    limit = most_drawn(200, float(rates.mean()), 0.05)
    assert ((rng.random((4000, 200)) < rates).sum(1) > limit).mean() < 0.05
    limit = most_drawn(60, 0.25, 0.05)
    without = rng.hypergeometric(60, 100, 40, 4000)
    assert (without > limit).mean() < 0.05
    assert stats.binom.sf(limit, 60, 0.25) < 0.05
    # The limit is not far above the mean.
    assert limit < 60 * 0.25 + 4 * math.sqrt(60 * 0.25)


def test_a_batch_of_all_records_has_all_canaries() -> None:
    assert most_drawn(50, 1.0, 0.01) == 50
    assert most_drawn(3, 0.9, 1e-9) == 3


def test_without_noise_the_largest_ratio_is_reported() -> None:
    found = audit_of(np.random.default_rng(0))
    assert ratio_bound(replace(found, noise_squares=0.0), 0.999) == MAX_RATIO
    assert ratio_bound(replace(found, noise_squares=0.0, total=0.0), 0.999) == 0.0
    assert ratio_bound(replace(found, total=-found.total), 0.999) == 0.0

"""Secure aggregation lowers epsilon with one local step, and not with two (docs/privacy.md).

A toy with one trainable number and sigma = C = 1. The server knows theta and sees the sum of the
messages of S clients only. The target record adds C to client 0's first gradient or is missing.
Client 0 has m other records, each with a clipped gradient that grows with theta. In the second step
they amplify the first noised gradient, so that the noise of the other clients no longer hides it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta

from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.mechanism import Mechanism

CLIENTS = 100
OTHER_RECORDS = 20_000
# Distance from the start at which the gradients of the other records reach the clip norm.
REACH = 5.0
TRIALS = 200_000
DELTA = 1e-5
THRESHOLDS = (0.5, 0.9, 0.99, 0.999, 0.9995)


def sums(present: bool, local_steps: int, rng: np.random.Generator) -> np.ndarray:
    """Return what the server sees in TRIALS rounds: the sum of all clients' messages."""
    first = float(present) + rng.standard_normal(TRIALS)
    if local_steps == 1:
        return first + math.sqrt(CLIENTS - 1) * rng.standard_normal(TRIALS)
    # The step size is 1 and the start 0. Each other record's gradient is at most C = 1.
    second = OTHER_RECORDS * np.clip(first / REACH, -1, 1) + rng.standard_normal(TRIALS)
    others = math.sqrt(2 * (CLIENTS - 1)) * rng.standard_normal(TRIALS)
    return first + second + others


def lower_bound(local_steps: int) -> float:
    """Return a lower bound on epsilon, at confidence 95 %, from guesses by thresholds."""
    rng = np.random.default_rng(1)
    without, with_record = (sums(present, local_steps, rng) for present in (False, True))
    half = TRIALS // 2
    alpha = 0.05 / (2 * len(THRESHOLDS))
    bounds = []
    # Half of the trials choose the thresholds, the other half measure the rates.
    for threshold in np.quantile(without[:half], THRESHOLDS):
        false = int((without[half:] > threshold).sum())
        true = int((with_record[half:] > threshold).sum())
        false_rate = beta.ppf(1 - alpha, false + 1, half - false)
        true_rate = beta.ppf(alpha, true, half - true + 1)
        bounds.append(math.log(max(true_rate - DELTA, 1e-12) / false_rate))
    return max(bounds)


def accounted(multiplier: float, steps: int) -> float:
    return epsilon([(Mechanism("poisson", 1.0, multiplier), steps)], DELTA)


def test_with_one_local_step_the_noise_of_all_clients_counts() -> None:
    claimed = accounted(math.sqrt(CLIENTS), 1)
    assert claimed == pytest.approx(0.34, abs=0.03)
    assert lower_bound(1) < claimed


def test_with_two_local_steps_it_does_not() -> None:
    claimed = accounted(math.sqrt(CLIENTS), 2)
    assert claimed == pytest.approx(0.50, abs=0.03)
    found = lower_bound(2)
    # Five times the claim, and below the figure that dpfed reports.
    assert 2.5 < found < accounted(1.0, 2)
    assert accounted(1.0, 2) == pytest.approx(6.57, abs=0.05)

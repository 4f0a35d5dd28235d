"""Statistical tests that batches and noise have the distributions that the accountant assumes.

The tests find faults that no lower bound on epsilon finds. One such fault is to cut batches out of
shuffled data where the accountant assumes independent draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.sampling import fixed_size

# Below this p-value, an audit reports the batches or the noise as wrong. It is very small, because
# false alarms cost trust, and real faults give far smaller p-values.
LAW_LEVEL = 1e-6


@dataclass(frozen=True)
class Law:
    """Result of testing if batches or noise have the law (distribution) of the accountant.

    what   the tested values: "batches" or "noise"
    tests  the p-value of each test, by the name of the test
    """

    what: Literal["batches", "noise"]
    tests: dict[str, float]

    @property
    def p_value(self) -> float:
        """The p-value of all tests together, with Bonferroni's correction."""
        return min(1.0, len(self.tests) * min(self.tests.values()))

    @property
    def broken(self) -> bool:
        return self.p_value < LAW_LEVEL

    @property
    def verdict(self) -> str:
        if not self.broken:
            return "as accounted"
        return f"NOT as accounted: {min(self.tests, key=self.tests.__getitem__)}"


def batch_law(mechanism: Mechanism, included: np.ndarray) -> Law:
    """Test if drawn batches have the distribution of the mechanism's sampling; return the p-values.

    included  `[clients, steps, units]` True if the unit (protected record) was in the client's
              batch at this step

    Four properties are tested: the batch sizes, how often each unit was drawn, the overlap of
    consecutive batches, and the overlap of two clients' batches. Batches cut out of shuffled data
    contain every unit equally often, and the second test finds this.
    """
    clients, steps, units = included.shape
    sizes = included.sum(2).reshape(-1).astype(float)
    counts = included.sum(1).astype(float)
    if mechanism.sampling == "poisson":
        q = mechanism.rate
        size_variance = units * q * (1 - q)
        tests = {
            "mean batch size": _binomial(sizes.sum(), included.size, q),
            "spread of batch sizes": _spread(
                sizes, units * q, size_variance, len(sizes), _excess(units, q)
            ),
        }
        variance = steps * q * (1 - q)
        freedom = counts.size
        pairs = units
        overlap = q**2
    else:
        b = fixed_size(mechanism.rate, units)
        q = b / units
        tests = {"batch size": float(np.all(sizes == b))}
        variance = steps * q * (1 - q) * units / max(1, units - 1)
        freedom = clients * (units - 1)
        # The number of units in both of two batches is hypergeometric. The test uses the binomial
        # distribution of equal mean: its variance is larger, so it gives no additional false
        # alarms.
        pairs = b
        overlap = q
    tests["how often each record is drawn"] = _spread(
        counts, steps * q, variance, freedom, _excess(steps, q)
    )
    for name, axis in (("consecutive", 1), ("two clients'", 0)):
        even, odd = _neighbours(included, axis)
        tests[f"overlap of {name} batches"] = _binomial(
            (even & odd).sum(), even.size // units * pairs, overlap
        )
    return Law("batches", tests)


def noise_law(noise: np.ndarray) -> Law:
    """Test if noise is standard normal and never repeated; return the p-values.

    The noise of different steps and of different clients must be independent.

    noise  `[clients, steps, P]` P numbers of noise for each client and step, divided by the
           standard deviation that is claimed for them
    """
    values = noise.reshape(-1).astype(float)
    tests = {"mean": _normal(values), "variance": _spread(values, 0.0, 1.0, len(values))}
    for name, axis in (("steps", 1), ("clients", 0)):
        even, odd = _neighbours(noise, axis)
        products = np.asarray(even * odd, dtype=float).reshape(-1)
        tests[f"repeated between {name}"] = _normal(products)
    return Law("noise", tests)


def _neighbours(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Pair neighbours along an axis: return its elements 0, 2, 4, ... and its elements 1, 3, 5, ...

    An element without a neighbour, at the end of the axis, is left out.
    """
    pairs = np.arange(values.shape[axis] // 2)
    return np.take(values, 2 * pairs, axis=axis), np.take(values, 2 * pairs + 1, axis=axis)


def _binomial(total: float, trials: int, chance: float) -> float:
    """Return the two-sided p-value of `total` successes in trials with success rate `chance`."""
    below = stats.binom.cdf(total, trials, chance)
    above = stats.binom.sf(total - 1, trials, chance)
    return min(1.0, 2 * float(min(below, above)))


def _normal(values: np.ndarray) -> float:
    """Return the two-sided p-value of the hypothesis that the mean is 0, by a normal approximation.

    The hypothesis says that the values are independent, with mean 0 and variance 1.
    """
    if len(values) == 0:
        return 1.0
    return float(2 * stats.norm.sf(abs(float(values.mean())) * math.sqrt(len(values))))


def _spread(
    values: np.ndarray, mean: float, variance: float, freedom: float, excess: float = 0.0
) -> float:
    """Return the two-sided p-value of the hypothesis that the values have this spread (variance).

    The test statistic is the sum of squared deviations from the known mean. The test compares it
    with a chi-squared distribution, scaled so that its variance fits the kurtosis of the values.

    mean     expected value under the hypothesis
    freedom  degrees of freedom of the chi-squared distribution
    excess   excess kurtosis of the values, 0 for normal values
    """
    squares = float(np.square(values - mean).sum())
    if variance <= 0 or freedom < 1:
        return float(squares <= 1e-9)
    scale = 1 + excess / 2
    law = stats.chi2(freedom / scale)
    total = squares / variance / scale
    return min(1.0, 2 * float(min(law.sf(total), law.cdf(total))))


def _excess(trials: int, rate: float) -> float:
    """Return the excess kurtosis of the binomial distribution; 0 if the success rate is 0 or 1."""
    spread = rate * (1 - rate)
    return (1 - 6 * spread) / (trials * spread) if spread > 0 else 0.0

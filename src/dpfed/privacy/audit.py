"""Statistics of an audit: lower bounds on epsilon, and tests of what the accountant assumes.

A canary is a record that is in the data if a fair coin says so. Guessing the coins from released
values better than (epsilon, delta)-DP allows disproves the claim. The bounds assume nothing about
noise, clipping or sampling. Each exceeds the true epsilon with probability 1 - confidence at most.

Many canaries in one run are scored after Steinke, Nasr and Jagielski 2023 ("Privacy Auditing with
One (1) Training Run"). Independent runs with one canary each are scored with Clopper-Pearson
intervals. Two-sided tests of batches and noise find faults that no bound on epsilon shows, such as
shuffled batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_loss, show_lower_bound, show_setting
from dpfed.privacy.sampling import fixed_size

# Shares of the canaries to guess; they must not depend on the scores.
GUESSED_SHARES = (1 / 32, 1 / 8, 1 / 2, 1)
# A tested law is broken below this p-value: false alarms cost trust, and the tests have power.
LAW_LEVEL = 1e-6
# No audit of a feasible size can prove a larger epsilon.
MAX_EPSILON = 64.0


@dataclass(frozen=True)
class Report:
    """Result of one audit and the claim: (claimed, delta)-DP of the worst client after `steps`."""

    audit: Literal["one run", "many draws"]
    seen: Literal["oracle", "server"]
    lower: float
    claimed: float
    delta: float
    confidence: float
    canaries: int
    clients: int
    steps: int

    @property
    def disproved(self) -> bool:
        return self.lower > self.claimed

    @property
    def verdict(self) -> str:
        return "DISPROVES the claim" if self.disproved else "consistent with the claim"


@dataclass(frozen=True)
class Law:
    """Result of testing the oracle's batches or noise against their law: one p-value per test."""

    what: Literal["batches", "noise"]
    tests: dict[str, float]

    @property
    def p_value(self) -> float:
        """The p-value of all tests together (Bonferroni)."""
        return min(1.0, len(self.tests) * min(self.tests.values()))

    @property
    def broken(self) -> bool:
        return self.p_value < LAW_LEVEL

    @property
    def verdict(self) -> str:
        if not self.broken:
            return "as accounted"
        return f"NOT as accounted: {min(self.tests, key=self.tests.__getitem__)}"


# ------------------------------------------------------------------ many canaries in one run


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound the probability of so many correct guesses under (epsilon, delta)-DP.

    Steinke et al., Theorem 5.2: beta + 2 m delta alpha with W ~ Binomial(r, e^eps/(1+e^eps)),
    beta = P[W >= v], alpha = max_i P[v > W >= v-i]/i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} correct of {guesses} guesses on {canaries} canaries cannot be")
    if correct == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, accuracy))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return the largest epsilon that so many correct guesses disprove, 0 if there is none.

    (epsilon, delta)-DP implies (epsilon', delta)-DP for every larger epsilon', so all smaller
    values are disproved as well.
    """

    def disproved(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    if not disproved(0.0):
        return 0.0
    low = 0.0
    high = MAX_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        if disproved(middle):
            low = middle
        else:
            high = middle
    return low


def one_run_bound(scores: np.ndarray, coins: np.ndarray, delta: float, confidence: float) -> float:
    """Return the lower bound from one score per canary; a high score means "in the data".

    The highest scores are guessed "in" and as many of the lowest "out". Each tried number of
    guesses gets its share of 1 - confidence.
    """
    ranked = coins.reshape(-1).astype(bool)[np.argsort(scores.reshape(-1), kind="stable")]
    count = len(ranked)
    sides = {max(1, round(share * count / 2)) for share in GUESSED_SHARES if count >= 2}
    bounds = [0.0]
    for side in sorted(side for side in sides if 2 * side <= count):
        correct = int(ranked[-side:].sum()) + side - int(ranked[:side].sum())
        confidence_each = 1 - (1 - confidence) / len(sides)
        bounds.append(one_run_epsilon(count, 2 * side, correct, delta, confidence_each))
    return max(bounds)


# ------------------------------------------------------------------ one canary in each of many runs


def many_draws_bound(
    scores: np.ndarray, coins: np.ndarray, delta: float, confidence: float
) -> float:
    """Return the lower bound from one score per independent run.

    For every set R of scores e^eps >= (P[R|in] - delta)/P[R|out], and the same with "in" and "out"
    exchanged. The first half of the runs chooses R, all scores on one side of a threshold. The
    second half tests R with two Clopper-Pearson intervals.
    """
    scores = scores.reshape(-1)
    coins = coins.reshape(-1).astype(bool)
    half = len(scores) // 2
    choosing = (scores[:half][coins[:half]], scores[:half][~coins[:half]])
    testing = (scores[half:][coins[half:]], scores[half:][~coins[half:]])
    if not all(len(part) for part in (*choosing, *testing)):
        return 0.0
    # Thresholds between the observed values, because runs without noise have few values.
    values = np.unique(scores[:half])
    cuts = np.concatenate([values[:1] - 1, (values[1:] + values[:-1]) / 2, values[-1:] + 1])
    high = _log_ratio_bound(*choosing, cuts, delta, confidence)
    low = _log_ratio_bound(-choosing[1], -choosing[0], -cuts, delta, confidence)
    if high.max() >= low.max():
        bound = _log_ratio_bound(*testing, cuts[[high.argmax()]], delta, confidence)
    else:
        bound = _log_ratio_bound(-testing[1], -testing[0], -cuts[[low.argmax()]], delta, confidence)
    return max(0.0, float(bound[0]))


def _log_ratio_bound(
    ins: np.ndarray, outs: np.ndarray, cuts: np.ndarray, delta: float, confidence: float
) -> np.ndarray:
    """Return a lower bound on log((P[in > cut] - delta) / P[out > cut]) at each cut, or -inf."""
    hits = len(ins) - np.searchsorted(np.sort(ins), cuts, side="right")
    false = len(outs) - np.searchsorted(np.sort(outs), cuts, side="right")
    error = (1 - confidence) / 2
    # Clopper-Pearson limits; their formulas have no value at no hit and at no miss.
    at_least = stats.beta.ppf(error, np.maximum(hits, 1), len(ins) - hits + 1)
    at_most = stats.beta.ppf(1 - error, false + 1, np.maximum(len(outs) - false, 1))
    at_least = np.where(hits > 0, at_least, 0.0)
    at_most = np.where(false < len(outs), at_most, 1.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(at_least - delta, 0.0)) - np.log(at_most))


def log_ratio(shift: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """Score a batch: its log-likelihood ratio of "canary in" to "out" if the claim is true.

    The bounds hold for any score; this one is close to the best.

    shift  <released sum, canary direction>/C, averaged over the releases of the batch: about 1 if
           the batch has the canary, 0 if not, -1 if it has the record that replaces the canary
    """
    precision = (mechanism.noise_multiplier**2 / mechanism.releases) ** -1
    with np.errstate(divide="ignore"):
        log_absent = np.log1p(-mechanism.rate)
    log_present = math.log(mechanism.rate)
    ratio = np.logaddexp(log_absent, log_present + (shift - 0.5) * precision)
    if mechanism.adjacency != "add/remove one":
        ratio = ratio - np.logaddexp(log_absent, log_present + (-shift - 0.5) * precision)
    return np.asarray(ratio)


# ------------------------------------------------------------------ the laws of batches and noise


def batch_law(mechanism: Mechanism, included: np.ndarray) -> Law:
    """Test if the mechanism's sampling drew these batches, `[clients, steps, units]` booleans.

    Tested are batch sizes, how often each unit was drawn, and overlaps of consecutive batches and
    of two clients' batches. Shuffled data draw every unit equally often.
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
        # The overlap is hypergeometric; the binomial of equal mean varies more, so it is safe.
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
    """Test if noise over its claimed standard deviation, `[clients, steps, P]`, is N(0, 1)."""
    values = noise.reshape(-1).astype(float)
    tests = {"mean": _normal(values), "variance": _spread(values, 0.0, 1.0, len(values))}
    for name, axis in (("steps", 1), ("clients", 0)):
        even, odd = _neighbours(noise, axis)
        products = np.asarray(even * odd, dtype=float).reshape(-1)
        tests[f"repeated between {name}"] = _normal(products)
    return Law("noise", tests)


def _neighbours(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements at even and at odd positions of an axis, in pairs."""
    pairs = np.arange(values.shape[axis] // 2)
    return np.take(values, 2 * pairs, axis=axis), np.take(values, 2 * pairs + 1, axis=axis)


def _binomial(total: float, trials: int, chance: float) -> float:
    """Return the two-sided p-value of a number of successes."""
    below = stats.binom.cdf(total, trials, chance)
    above = stats.binom.sf(total - 1, trials, chance)
    return min(1.0, 2 * float(min(below, above)))


def _normal(values: np.ndarray) -> float:
    """Return the two-sided p-value of the mean of values that should have mean 0 and variance 1."""
    if len(values) == 0:
        return 1.0
    return float(2 * stats.norm.sf(abs(float(values.mean())) * math.sqrt(len(values))))


def _spread(
    values: np.ndarray, mean: float, variance: float, freedom: float, excess: float = 0.0
) -> float:
    """Return the two-sided p-value of the sum of squared deviations from a known mean.

    Values with excess kurtosis have squares that vary more. A scaled chi-squared distribution has
    their mean and variance.
    """
    squares = float(np.square(values - mean).sum())
    if variance <= 0 or freedom < 1:
        return float(squares <= 1e-9)
    scale = 1 + excess / 2
    law = stats.chi2(freedom / scale)
    total = squares / variance / scale
    return min(1.0, 2 * float(min(law.sf(total), law.cdf(total))))


def _excess(trials: int, rate: float) -> float:
    """Return the excess kurtosis of a binomial distribution."""
    spread = rate * (1 - rate)
    return (1 - 6 * spread) / (trials * spread) if spread > 0 else 0.0


def disproofs(reports: Sequence[Report], laws: Sequence[Law]) -> Iterator[str]:
    """Return one sentence for each result that contradicts the claim."""
    for report in reports:
        if report.disproved:
            yield (
                f"{report.audit} at the {report.seen}: "
                f"epsilon is at least {show_lower_bound(report.lower)} with confidence "
                f"{show_setting(report.confidence)}, but {show_loss(report.claimed)} was claimed"
            )
    for law in laws:
        if law.broken:
            yield (
                f"the {law.what} do not follow the law that was accounted for ({law.verdict}, "
                f"p = {law.p_value:.1g})"
            )

"""Lower bounds on epsilon from what an attacker really achieves, and tests of the laws the accountant assumes.

A canary is a record that is in the data or not by the toss of a fair coin. Whoever guesses the coins from the released
values better than (epsilon, delta)-DP allows has disproved the claim. Nothing here assumes that noise, clipping or
sampling are right: the bounds are Steinke, Nasr, Jagielski 2023 ("Privacy Auditing with One (1) Training Run") for many
canaries in one run, and Clopper-Pearson for many independent runs with one canary each. They may be far below the truth
and never above it, except with probability 1 - confidence.

The laws are two-sided tests of what was drawn and added: they find what no bound on epsilon can see, such as batches
that were shuffled instead of drawn. `engine/audit.py` runs all of it on a job.
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

GUESSES = (1 / 32, 1 / 8, 1 / 2, 1)  # shares of the canaries that are guessed; fixed beforehand
LAW_LEVEL = 1e-6  # a law counts as broken below this p-value: the tests have power to spare, false alarms cost trust
_LARGEST = 64.0  # epsilon that no audit of a feasible size can reach


@dataclass(frozen=True)
class Report:
    """One audit beside the claim it tests: (claimed, delta)-DP for exactly `steps` steps of the worst client."""

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
    """Whether what the oracle drew or added follows the law that was accounted for; `tests` holds each p-value."""

    what: Literal["batches", "noise"]
    tests: dict[str, float]
    level: float = LAW_LEVEL

    @property
    def p_value(self) -> float:
        """Of all tests together (Bonferroni)."""
        return min(1.0, len(self.tests) * min(self.tests.values()))

    @property
    def broken(self) -> bool:
        return self.p_value < self.level

    @property
    def verdict(self) -> str:
        return (
            f"NOT as accounted: {min(self.tests, key=self.tests.__getitem__)}"
            if self.broken
            else "as accounted"
        )


# ------------------------------------------------------------------------------------ many canaries in one run


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Probability that an (epsilon, delta)-DP program allows so many correct guesses (Steinke et al., Theorem 5.2).

    beta + 2 m delta alpha with W ~ Binomial(r, e^eps/(1+e^eps)), beta = P[W >= v], alpha = max_i P[v > W >= v-i]/i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} correct of {guesses} guesses on {canaries} canaries cannot be")
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, accuracy))
    if correct == 0:
        return 1.0
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """The largest epsilon that so many correct guesses disprove; 0 if they disprove none.

    (epsilon, delta)-DP implies (epsilon', delta)-DP for every larger epsilon', so disproving one disproves all below.
    """

    def disproved(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    low, high = 0.0, _LARGEST
    if not disproved(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if disproved(middle) else (low, middle)
    return low


def one_run_bound(scores: np.ndarray, coins: np.ndarray, delta: float, confidence: float) -> float:
    """The bound from one score per canary, where larger speaks for "in".

    The highest scores are guessed "in", as many of the lowest "out", the middle is not guessed. How many is tried at a
    few numbers fixed beforehand, each with its share of 1 - confidence.
    """
    scores, coins = scores.reshape(-1), coins.reshape(-1).astype(bool)
    ranked = coins[np.argsort(scores, kind="stable")]
    sides = sorted(
        {max(1, round(share * len(scores) / 2)) for share in GUESSES if len(scores) >= 2}
    )
    each = 1 - (1 - confidence) / max(1, len(sides))
    bounds = [0.0]
    for side in (side for side in sides if 2 * side <= len(scores)):
        right = int(ranked[-side:].sum()) + side - int(ranked[:side].sum())
        bounds.append(one_run_epsilon(len(scores), 2 * side, right, delta, each))
    return max(bounds)


# ---------------------------------------------------------------------------- one canary in many independent runs


def many_draws_bound(
    scores: np.ndarray, coins: np.ndarray, delta: float, confidence: float
) -> float:
    """The bound from one score per independent run: e^eps >= (P[R|in] - delta)/P[R|out] for every set R, and vice versa.

    The first half of the runs chooses R (scores above or below a threshold), the second half tests that R alone, with
    Clopper-Pearson intervals of which both hold with the stated confidence.
    """
    scores, coins = scores.reshape(-1), coins.reshape(-1).astype(bool)
    half = len(scores) // 2
    first_in, first_out = _split(scores[:half], coins[:half])
    then_in, then_out = _split(scores[half:], coins[half:])
    if not all(len(part) for part in (first_in, first_out, then_in, then_out)):
        return 0.0
    # Strictly between the observed values, so that runs without noise, which have few values, are cut cleanly.
    values = np.unique(scores[:half])
    cuts = np.concatenate([values[:1] - 1, (values[1:] + values[:-1]) / 2, values[-1:] + 1])
    high = _ratio(first_in, first_out, cuts, delta, confidence)
    low = _ratio(-first_out, -first_in, -cuts, delta, confidence)
    if high.max() >= low.max():
        chosen = _ratio(then_in, then_out, cuts[[int(high.argmax())]], delta, confidence)
    else:
        chosen = _ratio(-then_out, -then_in, -cuts[[int(low.argmax())]], delta, confidence)
    return max(0.0, float(chosen[0]))


def _split(scores: np.ndarray, coins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return scores[coins], scores[~coins]


def _ratio(
    ins: np.ndarray, outs: np.ndarray, cuts: np.ndarray, delta: float, confidence: float
) -> np.ndarray:
    """Lower bound on log((P[in > cut] - delta) / P[out > cut]) at each cut, -inf where there is none."""
    hits = len(ins) - np.searchsorted(np.sort(ins), cuts, side="right")
    false = len(outs) - np.searchsorted(np.sort(outs), cuts, side="right")
    each = (1 - confidence) / 2
    at_least = np.where(
        hits > 0, stats.beta.ppf(each, np.maximum(hits, 1), len(ins) - hits + 1), 0.0
    )
    at_most = np.where(
        false < len(outs),
        stats.beta.ppf(1 - each, false + 1, np.maximum(len(outs) - false, 1)),
        1.0,
    )
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(at_least - delta, 0.0)) - np.log(at_most))


# ---------------------------------------------------------------------------------------------- what to look at


def log_ratio(shift: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """How much one batch speaks for the canary: the log-likelihood ratio of "in" to "out" if the claim is true.

    shift   <released sum, canary direction>/C, the mean over the releases of the batch: about 1 when the canary is in
            the batch and 0 when it is not. Where the neighbour replaces the record, its replacement pulls to -1.
    It is only a good score; the bounds hold for any.
    """
    precision = (mechanism.noise_multiplier**2 / mechanism.releases) ** -1
    with np.errstate(divide="ignore"):
        stay, go = np.log1p(-mechanism.rate), math.log(mechanism.rate)
    present = np.logaddexp(stay, go + (shift - 0.5) * precision)
    if mechanism.adjacency == "add/remove one":
        return np.asarray(present)
    return np.asarray(present - np.logaddexp(stay, go + (-shift - 0.5) * precision))


# ------------------------------------------------------------------------------------------------------ the laws


def batch_law(mechanism: Mechanism, included: np.ndarray) -> Law:
    """Whether batches `included` `[clients, steps, units]` (booleans) were drawn by the mechanism's sampling.

    Sizes of batches, how often each unit was drawn over all steps, and what two batches have in common, of consecutive
    steps and of two clients. Shuffled data fail by drawing every unit equally often, a fixed size by not varying.
    """
    clients, steps, units = included.shape
    sizes = included.sum(2).reshape(-1).astype(float)
    counts = included.sum(1).astype(float)
    if mechanism.sampling == "poisson":
        q = mechanism.rate
        tests = {
            "mean batch size": _binomial(sizes.sum(), included.size, q),
            "spread of batch sizes": _spread(
                sizes, units * q, units * q * (1 - q), len(sizes), _excess(units, q)
            ),
            "how often each record is drawn": _spread(
                counts, steps * q, steps * q * (1 - q), counts.size, _excess(steps, q)
            ),
        }
        both, chance = units, q**2
    else:
        b = fixed_size(mechanism.rate, units)
        q = b / units
        variance = steps * q * (1 - q) * units / max(1, units - 1)
        tests = {
            "batch size": float(np.all(sizes == b)),
            "how often each record is drawn": _spread(
                counts, steps * q, variance, clients * (units - 1), _excess(steps, q)
            ),
        }
        both, chance = (
            b,
            q,
        )  # hypergeometric; the binomial of the same mean varies more, which errs towards passing
    for name, axis in (("consecutive", 1), ("two clients'", 0)):
        even, odd = _halves(included, axis)
        tests[f"overlap of {name} batches"] = _binomial(
            (even & odd).sum(), even.size // units * both, chance
        )
    return Law("batches", tests)


def noise_law(noise: np.ndarray) -> Law:
    """Whether `noise` `[clients, steps, P]`, divided by its claimed standard deviation, is independent N(0, 1)."""
    flat = noise.reshape(-1).astype(float)
    tests = {
        "mean": _normal(flat),
        "variance": _spread(flat, 0.0, 1.0, len(flat)),
        "repeated between steps": _normal(_products(noise, 1)),
        "repeated between clients": _normal(_products(noise, 0)),
    }
    return Law("noise", tests)


def _halves(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint pairs of neighbours along an axis."""
    pairs = values.shape[axis] // 2
    even, odd = (np.take(values, np.arange(pairs) * 2 + i, axis=axis) for i in (0, 1))
    return even, odd


def _products(noise: np.ndarray, axis: int) -> np.ndarray:
    even, odd = _halves(noise, axis)
    return np.asarray(even * odd, dtype=float).reshape(-1)


def _binomial(total: float, trials: int, chance: float) -> float:
    """Two-sided p-value of a number of successes."""
    tails = stats.binom.cdf(total, trials, chance), stats.binom.sf(total - 1, trials, chance)
    return min(1.0, 2 * float(min(tails)))


def _normal(values: np.ndarray) -> float:
    """Two-sided p-value of the mean of independent values of mean 0 and variance 1; 1 where there are none."""
    if len(values) == 0:
        return 1.0
    return float(2 * stats.norm.sf(abs(float(values.mean())) * math.sqrt(len(values))))


def _spread(
    values: np.ndarray, mean: float, variance: float, freedom: float, excess: float = 0.0
) -> float:
    """Two-sided p-value of the sum of squared deviations from a known mean.

    Squares of values with excess kurtosis vary more than chi-squared: a scaled chi-squared has the same two moments.
    """
    squares = float(np.square(values - mean).sum())
    if variance <= 0 or freedom < 1:
        return float(squares <= 1e-9)
    scale = 1 + excess / 2
    total, freedom = squares / variance / scale, freedom / scale
    return min(1.0, 2 * float(min(stats.chi2.sf(total, freedom), stats.chi2.cdf(total, freedom))))


def _excess(trials: int, rate: float) -> float:
    """Excess kurtosis of a binomial number."""
    spread = rate * (1 - rate)
    return (1 - 6 * spread) / (trials * spread) if spread > 0 else 0.0


def disproofs(reports: Sequence[Report], laws: Sequence[Law]) -> Iterator[str]:
    """One sentence for everything that speaks against the claim; none when nothing does."""
    for report in reports:
        if report.disproved:
            yield (
                f"{report.audit} at the {report.seen}: "
                f"epsilon is at least {show_lower_bound(report.lower)} with confidence "
                f"{show_setting(report.confidence)}, but {show_loss(report.claimed)} was claimed"
            )
    for law in laws:
        if law.broken:
            yield f"the {law.what} do not follow the law that was accounted for ({law.verdict}, p = {law.p_value:.1g})"

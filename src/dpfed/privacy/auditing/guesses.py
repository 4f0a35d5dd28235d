"""Lower bounds on epsilon from guesses about canaries: f-DP auditing in one run.

A canary is a record for which a fair coin decides if it is in the data. The auditor guesses some of
these coins from the values that the mechanism releases. A trade-off curve limits how many guesses
can be right. More right guesses refute the curve. The bounds assume nothing about noise, clipping,
sampling or the independence of the canaries.

The test is that of Mahloujifar, Melis and Chaudhuri ("Auditing f-Differential Privacy in One Run",
ICML 2025). docs/audit-bounds.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpfed.privacy.accounting.history import Floats, History
from dpfed.privacy.accounting.pld import privacy_profile
from dpfed.privacy.accounting.tradeoff import undominated
from dpfed.privacy.mechanism import Mechanism

# The auditor makes one test for each of these fractions, and guesses for this fraction of all
# canaries if they are in the data. A choice by scores would make the bound invalid.
GUESSED_SHARES = (1 / 32, 1 / 8, 1 / 2)
# Largest epsilon that `epsilon_bound` tries. An audit would need too many canaries to prove more.
MAX_EPSILON = 64.0
# A trade-off curve has this many evenly spaced epsilons, and equally many that are logarithmically
# spaced. The largest epsilon is the one whose delta is about _CUTOFF.
_NODES = 100
_CUTOFF = 1e-7
# A trade-off curve is computed at this many evenly spaced epsilons, and at as many logarithmically
# spaced ones. At the largest epsilon, delta is about _CUTOFF.
_RUNGS_BELOW = 80
_RUNGS_ABOVE = 16
_RUNGS_PER_DOUBLING = 16

Least = Callable[[float], float]
"""Function: probability of an event in one data set -> its least probability in a neighbour."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Trade-off curve of all mechanisms that are (epsilons[i], deltas[i])-DP for every i."""

    epsilons: Floats
    deltas: Floats

    def least(self, probability: float) -> float:
        """Return the least probability that an event can have in a neighbouring data set.

        Let P be the event's `probability` in this data set, and Q in the neighbouring one. Then
        P <= e^epsilon Q + delta, and therefore Q >= (P - delta) e^-epsilon. For the complement of
        the event, it implies Q >= 1 - delta - e^epsilon (1 - P).
        """
        direct = (probability - self.deltas) * np.exp(-self.epsilons)
        exchanged = 1 - self.deltas - np.exp(self.epsilons) * (1 - probability)
        return max(0.0, float(direct.max()), float(exchanged.max()))


def approximate(epsilon: float, delta: float) -> Curve:
    """Return the trade-off curve of approximate DP: that of all (epsilon, delta)-DP mechanisms."""
    return Curve(np.array([epsilon]), np.array([delta]))


def accounted(histories: Sequence[History]) -> Least:
    """Return the trade-off curve that the accountant computes for a client's history.

    histories  possible histories, each with pairs (mechanism, number of local steps); the curve is
               valid whichever of them is the client's
    """
    curves = [_curve_of(history) for history in undominated(histories)]
    return lambda probability: min(curve.least(probability) for curve in curves)


@lru_cache(maxsize=256)
def _curve_of(history: History) -> Curve:
    return Curve(*privacy_profile(history, _CUTOFF, _NODES))


def refuted(canaries: int, guesses: int, correct: int, least: Least, error: float) -> bool:
    """Return True if `correct` right guesses of `guesses` refute the trade-off curve `least`.

    A curve is refuted if so many right guesses have a probability below `error` under it. To test
    this, suppose that the probability is `error` or more. Let p_j be the probability that j of the
    r guesses on m canaries are right. The curve then demands for every k:

        sum_{j >= k-1} (r - j) p_j / m  >=  least( sum_{j >= k} j p_j / m )

    The code computes the smallest p_j that satisfy all these inequalities, from j = `correct`
    downwards. If these p_j add up to more than one, the supposition is false.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} correct of {guesses} guesses on {canaries} canaries cannot be")
    right = error * correct / canaries
    wrong = error * (guesses - correct) / canaries
    for j in range(correct - 1, -1, -1):
        demanded = least(right)
        if demanded <= wrong:
            return False
        right += j / (guesses - j) * (demanded - wrong)
        wrong = demanded
        if right + wrong > guesses / canaries:
            return True
    return False


def counted_guesses(scores: Floats, coins: np.ndarray) -> list[tuple[int, int]]:
    """Guess from scores, and return (guesses, correct guesses) for each fraction in GUESSED_SHARES.

    scores  one number per canary; a high score suggests that the canary is in the data
    coins   the truth: True for each canary that is in the data

    The guess is "in" for the canaries with the highest scores, and "out" for equally many canaries
    with the lowest scores.
    """
    ranked = coins.reshape(-1).astype(bool)[np.argsort(scores.reshape(-1), kind="stable")]
    sides = {max(1, round(share * len(ranked) / 2)) for share in GUESSED_SHARES}
    return [
        (2 * side, int(ranked[-side:].sum()) + side - int(ranked[:side].sum()))
        for side in sorted(sides)
        if 2 * side <= len(ranked)
    ]


def _is_refuted(scores: Floats, coins: np.ndarray, least: Least, error: float) -> bool:
    """Return True if guesses by these scores are right more often than the trade-off curve allows.

    Each fraction in GUESSED_SHARES gives one test, and each test gets an equal part of `error`, the
    probability of a wrong result.
    """
    counts = counted_guesses(scores, coins)
    return any(
        refuted(coins.size, guesses, correct, least, error / len(counts))
        for guesses, correct in counts
    )


def epsilon_bound(scores: Floats, coins: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon at this delta, without assumptions about the mechanism.

    scores  one number per canary; a high score suggests that the canary is in the data
    coins   the truth: True for each canary that is in the data

    Guesses by scores refute an epsilon if they are right more often than (epsilon, delta)-DP
    allows. The bound is the largest refuted epsilon. All smaller epsilons are refuted too, because
    (epsilon, delta)-DP implies (epsilon', delta)-DP for larger epsilon'.
    """

    def holds_above(epsilon: float) -> bool:
        least = approximate(epsilon, delta).least
        return _is_refuted(scores, coins, least, 1 - confidence)

    low, high = 0.0, MAX_EPSILON
    if not holds_above(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if holds_above(middle):
            low = middle
        else:
            high = middle
    return low


def ladder_bound(
    scores: Floats, coins: np.ndarray, curve_at: Callable[[float], Least], confidence: float
) -> float:
    """Return a lower bound on the ratio of signal to noise, as a multiple of the claimed ratio.

    The signal is the shift of a released gradient sum by one canary.

    curve_at  returns the trade-off curve for a ratio; a larger ratio means less privacy

    The tested ratios form a ladder: 1.001 times the powers of a constant. Guesses refute a ratio if
    they are right more often than its curve allows. The bound is the largest refuted ratio, or 0 if
    none is refuted. A bound above 1 disproves the claim.
    """

    def is_refuted(rung: int) -> bool:
        return _is_refuted(scores, coins, curve_at(_ratio(rung)), 1 - confidence)

    low, high = -_RUNGS_BELOW - 1, _RUNGS_ABOVE + 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return _ratio(low) if low >= -_RUNGS_BELOW else 0.0


def _ratio(rung: int) -> float:
    return 1.001 * math.exp2(rung / _RUNGS_PER_DOUBLING)


def log_ratio(shift: Floats, mechanism: Mechanism, size: Floats | float = 1.0) -> Floats:
    """Return a canary's score for each batch: the log-likelihood ratio of "in" to "out".

    "In" means that the canary is in the training data. The likelihoods assume that the mechanism
    works as claimed. Lower bounds from scores are valid for any score, and this one separates "in"
    from "out" nearly as well as possible.

    shift  component of the released sum along the canary's gradient, divided by the clip norm C,
           and averaged over the batch's releases. It is about `size` if the batch has the canary,
           and about 0 if not. With replace-one adjacency, it is about -`size` if the batch has the
           record that replaces the canary.
    size   shift that the canary causes if it is in the batch, at most 1
    """
    precision = mechanism.releases / mechanism.noise_multiplier**2
    with np.errstate(divide="ignore"):
        log_absent = np.log1p(-mechanism.rate)
    log_present = math.log(mechanism.rate)
    ratio = np.logaddexp(log_absent, log_present + (shift - size / 2) * size * precision)
    if mechanism.adjacency != "add/remove one":
        opposite = (-shift - size / 2) * size * precision
        ratio = ratio - np.logaddexp(log_absent, log_present + opposite)
    return np.asarray(ratio, dtype=np.float64)

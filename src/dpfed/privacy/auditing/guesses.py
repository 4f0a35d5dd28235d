"""Lower bounds on epsilon from guesses: f-DP auditing in one run.

Fair coins decide which canaries are in the data. The auditor guesses some of the coins from what
the mechanism releases. More correct guesses than a trade-off curve allows refute this curve. The
bounds assume nothing about noise, clipping, sampling or the independence of the canaries.

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

# Shares of the canaries for which the audit guesses the result of the coin. The shares are
# constants, because shares that depend on the scores would make the bound invalid.
GUESSED_SHARES = (1 / 32, 1 / 8, 1 / 2)
# Largest lower bound that the search tries. No audit of a feasible size can prove a larger bound.
MAX_EPSILON = 64.0
# Number of evenly spaced epsilons of a curve. Equally many are spaced logarithmically. Both end
# where delta is about _CUTOFF.
_NODES = 100
_CUTOFF = 1e-7
# `ladder_bound` tests a series of ratios, called rungs: this many below the claimed ratio, above
# it, and in each doubling of the ratio.
_RUNGS_BELOW = 80
_RUNGS_ABOVE = 16
_RUNGS_PER_DOUBLING = 16

Least = Callable[[float], float]
"""Function: probability of an event in one data set -> its least probability in a neighbour."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A trade-off curve, given by pairs (epsilon, delta); a mechanism must satisfy all of them."""

    epsilons: Floats
    deltas: Floats

    def least(self, probability: float) -> float:
        """Return the least probability of an event in a neighbour of this data set.

        P <= e^epsilon Q + delta implies Q >= (P - delta) e^-epsilon. For the complement of the
        event, it implies Q >= 1 - delta - e^epsilon (1 - P).
        """
        direct = (probability - self.deltas) * np.exp(-self.epsilons)
        exchanged = 1 - self.deltas - np.exp(self.epsilons) * (1 - probability)
        return max(0.0, float(direct.max()), float(exchanged.max()))


def approximate(epsilon: float, delta: float) -> Curve:
    """Return the curve of all (epsilon, delta)-DP mechanisms."""
    return Curve(np.array([epsilon]), np.array([delta]))


def accounted(histories: Sequence[History]) -> Least:
    """Return `Curve.least` of a mechanism with any of these histories."""
    curves = [_curve_of(history) for history in undominated(histories)]
    return lambda probability: min(curve.least(probability) for curve in curves)


@lru_cache(maxsize=256)
def _curve_of(history: History) -> Curve:
    return Curve(*privacy_profile(history, _CUTOFF, _NODES))


def refuted(canaries: int, guesses: int, correct: int, least: Least, error: float) -> bool:
    """Return True if `correct` of `guesses` guesses refute the curve, up to this error probability.

    Suppose that P[at least `correct` guesses are right] is `error` or more. Let p_j be the
    probability of j right guesses, of r guesses on m canaries. The curve demands for every k:

        sum_{j >= k-1} (r - j) p_j / m  >=  least( sum_{j >= k} j p_j / m )

    The smallest p_j that satisfy it follow from k = `correct` downwards. If their sum exceeds one,
    the supposition is false, so fewer than `error` of all runs have so many right guesses.
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
    """Return (guesses, correct guesses) for each of GUESSED_SHARES.

    scores  one number per canary; a high score speaks for "in the data"
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
    """Return True if the guesses refute the curve for any of GUESSED_SHARES.

    The tests share the error probability equally.
    """
    counts = counted_guesses(scores, coins)
    return any(
        refuted(coins.size, guesses, correct, least, error / len(counts))
        for guesses, correct in counts
    )


def epsilon_bound(scores: Floats, coins: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon at this delta; it is valid for any mechanism.

    All smaller epsilons are refuted too, because (epsilon, delta)-DP implies (epsilon', delta)-DP
    for every larger epsilon'.
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

    curve_at  function: ratio -> trade-off curve; a larger ratio means less privacy

    The bound is the largest tested ratio whose curve the guesses refute, or 0 if they refute none.
    The tested ratios are 1.001 times powers of a constant. A result above 1 refutes the claim.
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
    """Return the score of each batch: the log-likelihood ratio of "canary in" to "canary out".

    The likelihoods assume that the mechanism works as claimed. The lower bounds are valid for any
    score. This score separates "in" from "out" nearly as well as possible.

    shift  <released sum, canary direction>/C of each batch, averaged over its releases. The value
           is about `size` if the batch has the canary, and about 0 if not. With replace-one
           adjacency, it is about -`size` if the batch has the record that replaces the canary.
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

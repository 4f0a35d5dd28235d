"""Lower bound on the ratio of signal to noise, from the shifts of released sums by canaries.

A canary is a record for which a fair coin decides if it is in the data. The auditor knows the
direction of each canary's gradient, and measures every released sum of gradients along it. If
clipping works, a canary shifts the sum by at most the clip norm C. The bound uses all measured
values directly, not only guesses about them. It assumes that the noise is Gaussian and independent,
and that batches are drawn as the accountant assumes. The noise level is not assumed, but measured
in directions that no canary has.

docs/audit-bounds.md derives the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import optimize, special, stats

# Largest ratio that `ratio_bound` returns. A ratio above 1 disproves the claim already, so larger
# results than this would add nothing.
MAX_RATIO = 8.0


@dataclass(frozen=True)
class Shifts:
    """The measured shifts of released sums by all canaries together, in units of the clip norm C.

    A canary's shift is the change of a released gradient sum along the canary's gradient.

    total           sum of the measured shifts; a canary that is not in the data counts only with
                    replace-one adjacency, where a canary with the opposite gradient replaces it
    noise_variance  variance of the noise in `total`, if the noise is as the accountant assumes
    chances         number of random draws for a batch: one for each counted canary and step
    rate            mean probability that such a draw puts the canary into the batch
    noise_values    number of measured values that contain noise only
    noise_squares   sum of the squares of these values, after each is divided by the standard
                    deviation that the accountant assumes for it
    """

    total: float
    noise_variance: float
    chances: int
    rate: float
    noise_values: int
    noise_squares: float


def ratio_bound(measured: Shifts, confidence: float) -> float:
    """Return a lower bound on the ratio of shift to noise, in units of the claimed ratio.

    The shift is the largest change of a released gradient sum by one canary.

    The bound fails only if one of three events happens: the noise level is above its estimate, the
    noise in `measured.total` is above its quantile `noise_in_total`, or more canaries are in the
    batches than `drawn`. Each has a probability of at most (1 - confidence)/3. Otherwise
    total <= shift · drawn + noise_in_total.
    """
    error = (1 - confidence) / 3
    least = float(stats.chi2.ppf(error, measured.noise_values))
    noise = math.sqrt(measured.noise_squares / least)
    noise_in_total = noise * math.sqrt(measured.noise_variance) * float(special.ndtri(1 - error))
    drawn = most_drawn(measured.chances, measured.rate, error)
    shift = (measured.total - noise_in_total) / drawn
    if shift <= 0:
        return 0.0
    # Compare before dividing: the noise is 0 in a broken build that adds none.
    return MAX_RATIO if shift >= MAX_RATIO * noise else shift / noise


def most_drawn(chances: int, rate: float, error: float) -> float:
    """Return an upper bound on how often canaries are drawn into batches (Chernoff's bound).

    It holds for independent draws with mean probability `rate`, and for draws without replacement
    (Hoeffding 1963).

    chances  number of draws, each of which decides if one canary is in a batch
    error    largest allowed probability that the bound is exceeded
    """
    if rate >= 1:
        return float(chances)
    allowed = -math.log(error) / chances

    def excess(share: float) -> float:
        divergence = special.rel_entr(share, rate) + special.rel_entr(1 - share, 1 - rate)
        return float(divergence) - allowed

    if excess(1.0) <= 0:
        return float(chances)
    return chances * float(optimize.brentq(excess, rate, 1.0))

"""Lower bound on the ratio of signal to noise, from the shifts that gradient canaries cause.

The auditor knows the direction of each canary's gradient, and measures every released sum along it.
A canary shifts the sum by at most C if clipping works. The bound uses the sizes of all measured
values, without a threshold. It assumes that the noise is Gaussian and independent, and that batches
are drawn as accounted. The size of the noise is measured, in directions that no canary has.

docs/audit-bounds.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import optimize, special, stats

# Largest ratio that is reported; the epsilon of a larger ratio says nothing more.
MAX_RATIO = 8.0


@dataclass(frozen=True)
class Shifts:
    """The signal of all canaries together in the released sums, in units of C.

    total           sum of all measured shifts; an absent canary counts only with replace-one
                    adjacency, where it is the opposite canary
    noise_variance  variance of the noise in `total`, if the noise is as accounted
    chances         how often canaries could be drawn: one for each step and counted canary
    rate            mean probability of drawing one, over all chances
    noise_values    number of measured values of pure noise
    noise_squares   sum of their squares; 1 is the variance that is accounted for a value
    """

    total: float
    noise_variance: float
    chances: int
    rate: float
    noise_values: int
    noise_squares: float


def ratio_bound(measured: Shifts, confidence: float) -> float:
    """Return a lower bound on the ratio of shift to noise, in units of the claimed ratio.

    Each of three events has a probability of at most (1 - confidence)/3: the noise is larger than
    estimated, the noise in `total` is larger than z of its standard deviations, or the batches
    contain more canaries than `most_drawn`. Otherwise total <= shift · drawn + z · noise holds.
    """
    error = (1 - confidence) / 3
    least = float(stats.chi2.ppf(error, measured.noise_values))
    noise = math.sqrt(measured.noise_squares / least)
    noise_in_total = noise * math.sqrt(measured.noise_variance) * float(special.ndtri(1 - error))
    drawn = most_drawn(measured.chances, measured.rate, error)
    shift = (measured.total - noise_in_total) / drawn
    if shift <= 0:
        return 0.0
    # Compare before the division, because a broken build may have no noise.
    return MAX_RATIO if shift >= MAX_RATIO * noise else shift / noise


def most_drawn(chances: int, rate: float, error: float) -> float:
    """Return a number that the canaries in all batches exceed with at most probability `error`.

    Chernoff's bound holds for independent draws whose rates have this mean, and for draws without
    replacement (Hoeffding 1963).
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

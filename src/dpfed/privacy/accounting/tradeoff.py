"""The trade-off curve of a history: the error rates that an attacker must have, and the mu of GDP.

A history has the mechanisms and steps that a client executed. The attacker guesses for each record
whether it was used in training. A false positive is an unused record that the attacker takes for a
used one, and a false negative is a used record that the attacker misses. All results follow from
the privacy profile delta(epsilon) of the accountant, an upper bound. Every approximation raises the
attacker's true-positive rate and the mu of Gaussian DP (GDP), so no result promises too much
privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from dpfed.privacy.accounting.history import Floats, History, released
from dpfed.privacy.accounting.pld import privacy_profile
from dpfed.privacy.mechanism import Mechanism

# Smallest delta of a profile. `gaussian_mu` ignores the epsilons at which delta is smaller.
CUTOFF = 1e-9
# A profile has this number of evenly spaced epsilons, and as many that are spaced logarithmically.
_NODES = 1500
_LARGEST_MU = 1e4


@dataclass(frozen=True, eq=False)
class Profile:
    """Upper bounds of the privacy profile delta(epsilon) at many values of epsilon, called nodes.

    epsilons  the nodes, ascending from 0
    deltas    delta at each node; between two nodes, delta is at most the straight line through
              both, drawn over e^epsilon
    exact     False if Renyi DP gives the deltas: near epsilon 0 they are too large to compute mu
    """

    epsilons: Floats
    deltas: Floats
    exact: bool


def profile_of(history: History) -> Profile:
    """Return the privacy profile delta(epsilon) of a history, down to delta = CUTOFF."""
    return _cached_profile(tuple(released(history)))


@lru_cache(maxsize=64)
def _cached_profile(history: tuple[tuple[Mechanism, int], ...]) -> Profile:
    exact = all(mechanism.sampling == "poisson" for mechanism, _ in history)
    return Profile(*privacy_profile(history, CUTOFF, _NODES), exact)


def true_positive_rates(profile: Profile, false_positive_rates: Sequence[float]) -> Floats:
    """Return the largest true-positive rate of any attacker at each false-positive rate.

    Each node (epsilon, delta) bounds the rate: TPR <= e^epsilon FPR + delta, and with both errors
    exchanged 1 - FPR <= e^epsilon (1 - TPR) + delta. The result is the smallest of all bounds.
    """
    rates = np.asarray(false_positive_rates, dtype=np.float64)[:, None]
    factor = np.exp(profile.epsilons)
    direct = factor * rates + profile.deltas
    exchanged = 1 - (1 - profile.deltas - rates) / factor
    smallest: Floats = np.minimum(direct, exchanged).min(axis=1)
    return np.clip(smallest, rates[:, 0], 1.0)


def gaussian_mu(profile: Profile) -> float | None:
    """Return the smallest mu whose Gaussian mechanism has at least the profile's deltas.

    Deltas below CUTOFF are ignored, and mu is 0 if all deltas are below CUTOFF. The result is
    infinite if no mu is large enough, and None for a profile that is not exact.
    """
    if not profile.exact:
        return None
    count = int((profile.deltas >= CUTOFF).sum())
    if count == 0:
        return 0.0
    # Keep one node whose delta is below the cutoff. The last interval then contains the epsilon at
    # which delta equals the cutoff.
    epsilons, deltas = profile.epsilons[: count + 1], profile.deltas[: count + 1]
    if deltas[-1] > 2 * CUTOFF:
        return math.inf
    high = 1.0
    while not _covers(high, epsilons, deltas):
        high *= 2
        if high > _LARGEST_MU:
            return math.inf
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _covers(middle, epsilons, deltas):
            high = middle
        else:
            low = middle
    return high


def gaussian_false_negatives(mu: float, false_positive_rates: Floats) -> Floats:
    """Return the smallest false-negative rate at each false-positive rate, under Gaussian DP.

    It is the rate of the best test of N(0, 1) against N(mu, 1).
    """
    rates: Floats = special.ndtr(-special.ndtri(false_positive_rates) - mu)
    return rates


def _covers(mu: float, epsilons: Floats, deltas: Floats) -> bool:
    """Return True if the Gaussian mechanism of this mu has at least the profile's deltas.

    The delta of the profile and the delta of the Gaussian are convex functions of x = e^epsilon.
    Between two nodes, the profile is below the straight line (chord) through both nodes, and the
    Gaussian is above its tangents at both nodes. It is enough to compare the deltas at the nodes
    and at the x where the two tangents meet. The code divides all x by the x of the left node,
    because e^epsilon can overflow.
    """
    upper: Floats = special.ndtr(mu / 2 - epsilons / mu)
    lower: Floats = np.exp(epsilons + special.log_ndtr(-mu / 2 - epsilons / mu))
    if np.any(upper - lower < deltas):
        return False
    width = np.exp(np.diff(epsilons))
    meeting = np.ones_like(width)
    slopes = lower[:-1] - lower[1:] / width
    np.divide(upper[:-1] - upper[1:], slopes, out=meeting, where=slopes > 0)
    meeting = np.clip(meeting, 1.0, width)
    tangent = upper[:-1] - lower[:-1] * meeting
    chord = deltas[:-1] + np.diff(deltas) * (meeting - 1) / (width - 1)
    enough: npt.NDArray[np.bool_] = tangent >= chord
    return bool(enough.all())


def attack_rates(
    histories: Sequence[History], false_positive_rates: Sequence[float]
) -> list[float]:
    """Return the largest true-positive rate of any attacker on any of these histories.

    The result has one rate for each false-positive rate.
    """
    found = [
        true_positive_rates(profile_of(history), false_positive_rates)
        for history in undominated(histories)
    ]
    rates: list[float] = np.max(found, axis=0).tolist()
    return rates


def largest_mu(histories: Sequence[History]) -> float | None:
    """Return the largest `gaussian_mu` of these histories; None if one of them has no mu."""
    found = [gaussian_mu(profile_of(history)) for history in undominated(histories)]
    known = [mu for mu in found if mu is not None]
    return max(known) if len(known) == len(found) else None


def undominated(histories: Sequence[History]) -> list[tuple[tuple[Mechanism, int], ...]]:
    """Return the distinct histories, without those whose privacy loss another one bounds.

    A history that bounds another one has the same steps, at least the same sampling rates and at
    most the same noise. Its delta is at least as large at every epsilon.
    """
    distinct = list(dict.fromkeys(map(tuple, histories)))
    return [
        history
        for history in distinct
        if not any(_dominates(other, history) for other in distinct if other != history)
    ]


def _dominates(history: History, other: History) -> bool:
    """Return True if `history` costs at least as much privacy as `other` at every epsilon.

    This holds if each entry of `history` has the same steps as the entry of `other`, at least the
    same rate and at most the same noise. Return False if the sampling is not Poisson.
    """
    return len(history) == len(other) and all(
        mine.sampling == its.sampling == "poisson"
        and (mine.batches, mine.releases, steps) == (its.batches, its.releases, its_steps)
        and mine.rate >= its.rate
        and mine.noise_multiplier <= its.noise_multiplier
        for (mine, steps), (its, its_steps) in zip(history, other, strict=True)
    )

"""Epsilon and delta of a client's history (all mechanisms that the client has executed).

Poisson sampling is accounted for with privacy-loss distributions (PLD), where neighbours differ by
one added or removed record. Renyi DP (RDP) checks every result: its epsilon must not be smaller.
Fixed-size sampling is accounted for with RDP, where neighbours differ by one replaced record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.history import Floats, History, check_delta, released
from dpfed.privacy.accounting.loss_distribution import (
    Relation,
    Term,
    compose,
    interval_for,
    rounding,
    steps_of,
    terms_of,
)
from dpfed.privacy.accounting.rdp import (
    ORDERS,
    rdp_curve,
    rdp_curve_delta,
    rdp_curve_epsilon,
    rdp_epsilon,
    rdp_of_step,
)

# A PLD epsilon may exceed the RDP epsilon by this relative amount, because PLD rounds privacy
# losses up to grid points.
_RDP_SLACK = 1e-6
# Largest epsilon in a privacy profile. Above 709, e^epsilon overflows in float64.
_LARGEST_NODE = 700.0


class AccountingError(RuntimeError):
    """Raised if two accountants contradict each other, which is always a defect of this program."""


@lru_cache(maxsize=4096)
def epsilon_of_terms(
    terms: tuple[Term, ...], delta: float, relation: Relation = "add/remove one"
) -> float:
    """Return the PLD epsilon: the smallest epsilon with delta(epsilon) <= delta.

    The grid of privacy losses is refined until it is as fine as this epsilon needs. The result is 0
    without terms (nothing was released), and infinite if a term has no noise.

    terms     the steps that the client executed, as `terms_of` returns them
    relation  how neighbouring data sets differ
    """
    if not terms:
        return 0.0
    if any(term.multiplier == 0 for term in terms):
        return math.inf
    # Begin with a grid width (`interval`) of at least 1e-4, and refine it if needed. For a small
    # epsilon the RDP estimate is inaccurate, and the grid that it asks for may be needlessly fine.
    interval = max(1e-4, interval_for(rough_epsilon(terms, delta)))
    while True:
        distribution = compose(terms, interval, relation)
        value = float(distribution.get_epsilon_for_delta(delta - rounding(steps_of(terms))))
        wanted = interval_for(value, terms)
        # Also stop if epsilon is 0 or infinite, because a finer grid would not change it.
        if value == 0 or not math.isfinite(value) or interval <= wanted:
            return value
        interval = wanted


def rough_epsilon(terms: tuple[Term, ...], delta: float) -> float:
    """Return an estimate of epsilon by Renyi DP, from which the first grid of losses is chosen."""
    curves = (t.steps * t.rounds * rdp_of_step("poisson", t.rate, t.multiplier) for t in terms)
    return min(rdp_curve_epsilon(sum(curves, np.zeros(len(ORDERS))), delta), 1e12)


def pld_epsilon(history: History, delta: float) -> float:
    """Return the PLD epsilon of a history (mechanisms and steps) of Poisson sampling.

    It is infinite without noise.
    """
    check_delta(delta)
    return epsilon_of_terms(terms_of(history), delta)


def replace_one_epsilon(history: History, delta: float) -> float:
    """Return epsilon for neighbouring data sets that differ by one replaced record.

    For fixed-size sampling this is the reported epsilon. For Poisson sampling it is reported in
    addition to the epsilon for one added or removed record.
    """
    check_delta(delta)
    entries = released(history)
    if any(mechanism.sampling == "fixed_wor" for mechanism, _ in entries):
        return rdp_epsilon(entries, delta)
    return epsilon_of_terms(terms_of(entries), delta, "replace one")


def check_against_rdp(value: float, bound: float) -> None:
    """Raise AccountingError if a PLD epsilon exceeds the RDP epsilon.

    The PLD epsilon and the RDP epsilon bound the same privacy loss from above, and the RDP epsilon
    must be the larger one.

    value  PLD epsilon
    bound  RDP epsilon
    """
    if value > bound * (1 + _RDP_SLACK) + 1e-9:
        raise AccountingError(
            f"the PLD epsilon {value!r} exceeds its RDP check {bound!r}; neither may be used."
        )


def epsilon(history: History, delta: float) -> float:
    """Return the epsilon of a history (mechanisms and steps) that is reported to users.

    It comes from Renyi DP (RDP) for fixed-size sampling, and else from privacy-loss distributions.
    A PLD epsilon is checked against the RDP epsilon before it is returned.
    """
    check_delta(delta)
    entries = released(history)
    bound = rdp_epsilon(entries, delta)
    if entries and entries[0][0].sampling == "fixed_wor":
        return bound
    value = pld_epsilon(entries, delta)
    check_against_rdp(value, bound)
    return value


def delta_curve(history: History, epsilons: Sequence[float]) -> list[float]:
    """Return delta(epsilon) of a history (mechanisms and steps) for each given epsilon >= 0.

    The deltas are rounded up.
    """
    if any(not at >= 0 for at in epsilons):
        raise DpfedError("delta(epsilon) is asked for at epsilons of 0 or more.")
    entries = released(history)
    if not entries:
        return [0.0 for _ in epsilons]
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in entries):
        return [1.0 for _ in epsilons]
    if entries[0][0].sampling == "fixed_wor":
        curve = rdp_curve(entries)
        return [rdp_curve_delta(curve, at) for at in epsilons]
    terms = terms_of(entries)
    upper = _deltas_of(_distribution_for_deltas(terms), terms, np.asarray(epsilons, dtype=float))
    return [float(delta) for delta in upper]


def _deltas_of(distribution: Any, terms: tuple[Term, ...], epsilons: Floats) -> Floats:
    """Return delta(epsilon) of a loss distribution, rounded up, for epsilons in any order.

    distribution  composed privacy-loss distribution of all `terms`
    """
    order = np.argsort(epsilons)
    deltas = np.empty(len(epsilons))
    deltas[order] = distribution.get_delta_for_epsilon(epsilons[order])
    upper: Floats = np.minimum(1.0, np.maximum(0.0, deltas) + rounding(steps_of(terms)))
    return upper


def privacy_profile(history: History, cutoff: float, nodes: int) -> tuple[Floats, Floats]:
    """Return (epsilons, deltas): many points of the curve delta(epsilon), with delta rounded up.

    The epsilons begin at 0 and end where delta is about `cutoff`. One half is evenly spaced. The
    other half is spaced logarithmically, because the curve bends most near 0.

    nodes  number of epsilons in each half
    """
    entries = released(history)
    poisson = all(mechanism.sampling == "poisson" for mechanism, _ in entries)
    if not poisson:
        epsilons = _nodes(rdp_epsilon(entries, cutoff), nodes)
        return epsilons, np.array(delta_curve(entries, epsilons.tolist()))
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in entries):
        return np.zeros(1), np.ones(1)
    terms = terms_of(entries)
    if not terms:
        return np.zeros(1), np.zeros(1)
    distribution = _distribution_for_deltas(terms)
    least = max(cutoff / 10, cutoff - rounding(steps_of(terms)))
    top = float(distribution.get_epsilon_for_delta(least))
    epsilons = _nodes(top, nodes)
    return epsilons, _deltas_of(distribution, terms, epsilons)


def _nodes(top: float, count: int) -> Floats:
    if top <= 0:
        return np.zeros(1)
    top = min(top, _LARGEST_NODE)
    return np.union1d(np.linspace(0.0, top, count), np.geomspace(1e-5 * top, top, count))


def _distribution_for_deltas(terms: tuple[Term, ...]) -> Any:
    """Return the composed loss distribution on a grid that is fine enough to compute deltas.

    The grid of losses is refined until it is fine in relation to the spread of the losses.
    delta(0), the delta at epsilon 0, measures this spread.
    """
    interval = interval_for(rough_epsilon(terms, 1e-5), terms)
    while True:
        distribution = compose(terms, interval)
        wanted = interval_for(4 * float(distribution.get_delta_for_epsilon(0.0)), terms)
        # Accept any grid that is wider than 1e-4. Epsilon is then over 200, and delta(0) is 1 on
        # any grid.
        if interval <= wanted or interval > 1e-4:
            return distribution
        interval = wanted


def delta_at(history: History, at: float) -> float:
    """Return delta(epsilon) of the history at one epsilon, `at`."""
    return delta_curve(history, [at])[0]


def membership_advantage(history: History) -> float:
    """Return the largest advantage of any membership test of one record, given this history.

    The advantage is the true-positive rate minus the false-positive rate. Its maximum equals delta
    at epsilon 0. For fixed-size sampling the test decides which of two records is in the data.
    """
    return delta_at(history, 0.0)


def tuning_epsilon(history: History, delta: float, runs: int) -> float:
    """Return the epsilon of tuning: `runs` runs on the same data, each with this history.

    The privacy losses of all runs are added (composed). The user may therefore choose the best run
    in any way, and may even publish every run.
    """
    check_delta(delta)
    if runs < 1:
        raise DpfedError(f"the number of tuning runs must be at least 1, not {runs}.")
    return epsilon([(mechanism, steps * runs) for mechanism, steps in history], delta)

"""Epsilon and delta of a history of noised steps.

Poisson sampling: privacy-loss distributions under add/remove one record, with Renyi DP beside them
as a check that must not be smaller. Fixed-size sampling: Renyi DP under replace one record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.history import History, check_delta, released
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

# Relative excess over RDP that the pessimistic grid of PLD may cause.
_RDP_SLACK = 1e-6


class AccountingError(RuntimeError):
    """Two accountants contradict each other: a defect of this program, never of its user."""


@dataclass(frozen=True)
class Epsilon:
    """An epsilon with the accountant and the adjacency that it holds for."""

    value: float
    accountant: str
    adjacency: str


@lru_cache(maxsize=4096)
def epsilon_of_terms(
    terms: tuple[Term, ...], delta: float, relation: Relation = "add/remove one"
) -> float:
    """Smallest epsilon with delta(epsilon) <= delta, on a grid as fine as that epsilon needs."""
    if not terms:
        return 0.0
    if any(term.multiplier == 0 for term in terms):
        return math.inf
    # RDP says nothing about a small epsilon.
    interval = max(1e-4, interval_for(rough_epsilon(terms, delta)))
    while True:
        distribution = compose(terms, interval, relation)
        value = float(distribution.get_epsilon_for_delta(delta - rounding(steps_of(terms))))
        wanted = interval_for(value, terms)
        # An epsilon of 0 cannot become smaller.
        if value == 0 or not math.isfinite(value) or interval <= wanted:
            return value
        interval = wanted


def rough_epsilon(terms: tuple[Term, ...], delta: float) -> float:
    """An RDP estimate that chooses the first grid; too fine a grid would exhaust memory."""
    curves = (t.steps * t.rounds * rdp_of_step("poisson", t.rate, t.multiplier) for t in terms)
    return min(rdp_curve_epsilon(sum(curves, np.zeros(len(ORDERS))), delta), 1e12)


def pld_epsilon(history: History, delta: float) -> float:
    """Epsilon of a Poisson history under add/remove by PLD; infinite without noise."""
    check_delta(delta)
    return epsilon_of_terms(terms_of(history), delta)


def replace_one_epsilon(history: History, delta: float) -> float:
    """Epsilon when one record is replaced by another of norm at most C.

    A Poisson history has it beside the reported figure. Fixed-size sampling reports it.
    """
    check_delta(delta)
    entries = released(history)
    if any(mechanism.sampling == "fixed_wor" for mechanism, _ in entries):
        return rdp_epsilon(entries, delta)
    return epsilon_of_terms(terms_of(entries), delta, "replace one")


def check_against_rdp(value: float, bound: float) -> None:
    """Refuse a PLD epsilon above RDP: both bound the same truth and RDP is the looser one."""
    if value > bound * (1 + _RDP_SLACK) + 1e-9:
        raise AccountingError(
            f"the PLD epsilon {value!r} exceeds its RDP check {bound!r}; neither may be used."
        )


def epsilon(history: History, delta: float) -> Epsilon:
    """The epsilon to report: PLD checked by RDP for Poisson sampling, RDP for fixed size."""
    check_delta(delta)
    entries = released(history)
    bound = rdp_epsilon(entries, delta)
    if entries and entries[0][0].sampling == "fixed_wor":
        return Epsilon(bound, "RDP", entries[0][0].adjacency)
    value = pld_epsilon(entries, delta)
    check_against_rdp(value, bound)
    return Epsilon(value, "PLD", "add/remove one")


def delta_curve(history: History, epsilons: Sequence[float]) -> list[float]:
    """delta(epsilon) of the history at each given epsilon >= 0, rounded up."""
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
    distribution = _distribution_for_deltas(terms)
    lost = rounding(steps_of(terms))
    return [
        min(1.0, max(0.0, float(distribution.get_delta_for_epsilon(float(at)))) + lost)
        for at in epsilons
    ]


def _distribution_for_deltas(terms: tuple[Term, ...]) -> Any:
    """A loss distribution whose grid is fine against the spread of losses, as delta(0) shows it."""
    interval = interval_for(rough_epsilon(terms, 1e-5), terms)
    while True:
        distribution = compose(terms, interval)
        wanted = interval_for(4 * float(distribution.get_delta_for_epsilon(0.0)), terms)
        # Above 1e-4 epsilon is over 200, and delta(0) is 1.
        if interval <= wanted or interval > 1e-4:
            return distribution
        interval = wanted


def delta_at(history: History, at: float) -> float:
    """delta(epsilon) of the history at one epsilon."""
    return delta_curve(history, [at])[0]


def membership_advantage(history: History) -> float:
    """Largest true-positive minus false-positive rate of any membership test of one record.

    It is delta at epsilon 0. For fixed-size sampling the test is "this record or that one".
    """
    return delta_at(history, 0.0)


def tuning_epsilon(history: History, delta: float, runs: int) -> float:
    """Epsilon of the best of `runs` runs, each with this `history`, on the same data.

    All runs are composed, so the choice may be made in any way, and every run may be published.
    """
    check_delta(delta)
    if runs < 1:
        raise DpfedError(f"the number of tuning runs must be at least 1, not {runs}.")
    return epsilon([(mechanism, steps * runs) for mechanism, steps in history], delta).value

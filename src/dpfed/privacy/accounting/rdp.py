"""Renyi differential privacy (RDP): epsilons of fixed-size sampling, and bounds for all others.

The epsilon of Poisson sampling comes from privacy-loss distributions (PLD). It is checked against
the RDP epsilon, which is an upper bound.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import dp_accounting as dpa
import numpy as np
from dp_accounting import rdp as dpa_rdp
from dp_accounting.rdp import rdp_privacy_accountant as dpa_rdp_curve

from dpfed.privacy.accounting.history import Floats, History, check_delta, released

ORDERS = np.asarray(dpa_rdp_curve.DEFAULT_RDP_ORDERS, dtype=np.float64)
# Relative amount that `rdp_of_step` adds to each divergence. Rounding errors then never make
# epsilon too small.
_RDP_ROUNDING = 2e-16


@contextlib.contextmanager
def _orders_may_fail() -> Iterator[None]:
    """Hide the log message of dp_accounting about Renyi orders that did not converge.

    dp_accounting leaves out such orders. This can only raise epsilon, so the result stays valid.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@lru_cache(maxsize=256)
def rdp_of_step(sampling: str, rate: float, multiplier: float) -> Floats:
    """Return the Renyi divergence of one batch at each of ORDERS, rounded up.

    sampling    "poisson" or "fixed_wor"
    rate        probability that a given record is in the batch
    multiplier  effective noise multiplier, which covers all releases of the batch
    """
    if multiplier == 0:
        return np.full(len(ORDERS), math.inf)
    gaussian = dpa.GaussianDpEvent(multiplier)
    event: Any
    if sampling == "poisson":
        relation = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dpa.PoissonSampledDpEvent(rate, gaussian)
    else:
        relation = dpa.NeighboringRelation.REPLACE_ONE
        # dp_accounting takes the sampling rate as a ratio of integers. Round the rate up to a
        # multiple of 1e-12.
        drawn = min(10**12, math.ceil(rate * 10**12))
        event = dpa.SampledWithoutReplacementDpEvent(10**12, drawn, gaussian)
    accountant = dpa_rdp.RdpAccountant(orders=ORDERS, neighboring_relation=relation)
    with _orders_may_fail():
        accountant.compose(event)
    allowance = _RDP_ROUNDING * (ORDERS + 10) / (ORDERS - 1)
    return cast(Floats, np.maximum(accountant.rdp, 0) + allowance)


def rdp_curve(history: History) -> Floats:
    """Return the Renyi divergence of a history (mechanisms and steps) at each of ORDERS."""
    curves = (
        steps
        * mechanism.batches
        * rdp_of_step(mechanism.sampling, mechanism.rate, mechanism.effective_multiplier)
        for mechanism, steps in released(history)
    )
    return sum(curves, np.zeros(len(ORDERS)))


def mixed_rdp_curve(curve: Floats, probability: float, rounds: int) -> Floats:
    """Return the Renyi divergence of `rounds` rounds at each of ORDERS.

    The client takes part in each round with `probability`. The bound holds even if the adversary
    learns in which rounds it took part.

    curve  Renyi divergence of one round at each of ORDERS
    """
    factor = ORDERS - 1
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp(np.log1p(-probability), np.log(probability) + factor * curve)
    return cast(Floats, rounds * np.maximum(mixed, 0) / factor)


def rdp_curve_epsilon(curve: Floats, delta: float) -> float:
    """Return the epsilon that follows from Renyi divergences at ORDERS; infinite if all are."""
    return float(dpa_rdp_curve.compute_epsilon(ORDERS, curve, delta)[0])


def rdp_curve_delta(curve: Floats, epsilon: float) -> float:
    """Return the delta(epsilon) that follows from Renyi divergences at the orders in ORDERS."""
    return float(dpa_rdp_curve.compute_delta(ORDERS, curve, epsilon)[0])


def rdp_epsilon(history: History, delta: float) -> float:
    """Return the RDP epsilon of a history (mechanisms and steps); 0 without steps.

    Poisson sampling follows Mironov et al. 2019, where neighbours differ by one added or removed
    record. Fixed-size sampling follows Wang et al. 2019, Theorem 9, where neighbours differ by one
    replaced record. The sensitivity is then 2C instead of C, the clip norm.
    """
    check_delta(delta)
    return rdp_curve_epsilon(rdp_curve(history), delta) if released(history) else 0.0

"""Draw batches, by the kinds of sampling that have an accounting in `Mechanism`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan

Positions = np.ndarray


def draw(mechanism: Mechanism, units: int, rng: np.random.Generator) -> Positions:
    """The positions, among a client's protected units, of one fresh batch."""
    if mechanism.sampling == "poisson":
        return np.flatnonzero(rng.random(units) < mechanism.rate)
    return np.sort(rng.choice(units, size=fixed_size(mechanism.rate, units), replace=False))


def fixed_size(rate: float, units: int) -> int:
    return max(1, round(rate * units))


def batches(plan: Plan, client: int, rng: np.random.Generator) -> Iterator[Positions]:
    """Fresh batches of one client without end, as its plan says."""
    units = int(plan.sizes[client])
    mechanism = plan.mechanism(client)
    while True:
        yield draw(mechanism, units, rng)

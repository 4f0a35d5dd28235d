"""How batches are drawn. `draw` knows the kinds that have an accounting in `Mechanism`; shuffling has none."""

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
    if plan.sampling == "shuffle":
        yield from shuffled(units, fixed_size(float(plan.rates[client]), units), rng)
    mechanism = plan.mechanism(client)
    while True:
        yield draw(mechanism, units, rng)


def shuffled(units: int, size: int, rng: np.random.Generator) -> Iterator[Positions]:
    """Slices of one permutation after another, the short last slice dropped: what data loaders do. It has no accounting."""
    while True:
        order = rng.permutation(units)
        for first in range(0, units - size + 1, size):
            yield np.sort(order[first : first + size])

"""How a batch is drawn. Every kind here has its accounting in `Mechanism`; a kind that has none is not here."""

from __future__ import annotations

import numpy as np

from dpfed.privacy.mechanism import Mechanism

Positions = np.ndarray


def draw(mechanism: Mechanism, units: int, rng: np.random.Generator) -> Positions:
    """The positions, among a client's protected units, of one fresh batch."""
    if mechanism.sampling == "poisson":
        return np.flatnonzero(rng.random(units) < mechanism.rate)
    return np.sort(rng.choice(units, size=fixed_size(mechanism.rate, units), replace=False))


def fixed_size(rate: float, units: int) -> int:
    return max(1, round(rate * units))

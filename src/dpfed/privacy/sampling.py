"""Draw the batches of a fleet, by the kinds of sampling that have an accounting in `Mechanism`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan

Positions = np.ndarray


class RecordsOfUnits(Protocol):
    """The protected units of each client (data/partition.py)."""

    def slots(self, client: int, positions: Positions) -> tuple[np.ndarray, np.ndarray]:
        """Return the records of the units at these positions, and the number of each unit."""


@dataclass(frozen=True)
class DrawnBatch:
    """One drawn batch of the whole fleet, record after record.

    row     which record             unit    its protected unit (0..U-1), ascending
    client  its row of theta         owner   `[U]` the row of theta that owns each unit
    key     names the record in this step, for dropout and augmentations
    """

    row: np.ndarray
    client: np.ndarray
    unit: np.ndarray
    owner: np.ndarray
    key: np.ndarray

    def chunks(self, limit: int) -> list[DrawnBatch]:
        """Cut the batch into pieces of at most `limit` records; a larger unit is a piece alone."""
        pieces: list[DrawnBatch] = []
        counts = np.bincount(self.unit, minlength=len(self.owner))
        ends = np.cumsum(counts)
        first = 0
        while first < len(self.owner):
            start = ends[first] - counts[first]
            last = max(first + 1, int(np.searchsorted(ends, start + limit, side="right")))
            part = slice(start, ends[last - 1])
            unit, owner = self.unit[part] - first, self.owner[first:last]
            pieces.append(
                DrawnBatch(self.row[part], self.client[part], unit, owner, self.key[part])
            )
            first = last
        return pieces

    def single(self, i: int) -> DrawnBatch:
        """Return record i alone, as a unit of its own."""
        only = slice(i, i + 1)
        client = self.client[only]
        return DrawnBatch(self.row[only], client, np.zeros_like(client), client, self.key[only])


def draw(mechanism: Mechanism, units: int, rng: np.random.Generator) -> Positions:
    """Return the positions, among a client's protected units, of one fresh batch."""
    if mechanism.sampling == "poisson":
        return np.flatnonzero(rng.random(units) < mechanism.rate)
    return np.sort(rng.choice(units, size=fixed_size(mechanism.rate, units), replace=False))


def fixed_size(rate: float, units: int) -> int:
    """Return the batch size of sampling without replacement."""
    return max(1, round(rate * units))


def batches(plan: Plan, client: int, rng: np.random.Generator) -> Iterator[Positions]:
    """Yield fresh batches of one client without end."""
    units = int(plan.sizes[client])
    mechanism = plan.mechanism(client)
    while True:
        yield draw(mechanism, units, rng)


def joined_batch(
    units: RecordsOfUnits, clients: Sequence[int], positions: Sequence[Positions], step: int
) -> DrawnBatch:
    """Return the records of these units of each client as one batch."""
    found = [units.slots(client, p) for client, p in zip(clients, positions, strict=True)]
    counts = np.concatenate([count for _, count in found])
    if len(counts) and counts.min() < 1:
        raise ValueError("a protected unit without records has no gradient")
    owner = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
    unit = np.repeat(np.arange(len(owner)), counts)
    return DrawnBatch(
        row=np.concatenate([row for row, _ in found]),
        client=owner[unit],
        unit=unit,
        owner=owner,
        key=_keys(np.concatenate(positions), counts, step),
    )


def _keys(positions: Positions, counts: np.ndarray, step: int) -> np.ndarray:
    """Return a key for each record, from its place at its client and the step.

    Keys do not depend on the other clients of the fleet. Without a unit, later units have other
    places. The user of keys adds a secret number, so the draws made from them hide the place.
    """
    unit = np.repeat(positions, counts).astype(np.uint64)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    within = (np.arange(len(unit)) - firsts).astype(np.uint64)
    with np.errstate(over="ignore"):
        place = (unit << np.uint64(20)) + within
        mixed = place * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed + np.uint64(step) * np.uint64(0xD1B54A32D192ED03)
    return np.asarray(mixed.astype(np.int64))

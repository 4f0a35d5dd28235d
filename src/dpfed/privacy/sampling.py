"""Draw the batches of several clients, by Poisson or fixed-size sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan

Positions = np.ndarray


class RecordsOfUnits(Protocol):
    """Finds the records of a client's protected units (implemented in data/partition.py).

    A protected unit is one record, or all records of one person.
    """

    def slots(self, client: int, positions: Positions) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the records of these units, and the number of records per unit.

        client     number of the client that has the units
        positions  numbers of the units among the client's units, counted from 0
        """


@dataclass(frozen=True)
class DrawnBatch:
    """The batches that S clients draw in one step: M records of U protected units.

    Theta `[S, P]` has the P parameters of each client. A pass is one forward and backward
    computation of many records.

    row     `[M]` index of the record in the tensors that hold all records
    client  `[M]` row of theta `[S, P]` that belongs to the record's client
    unit    `[M]` number of the record's protected unit, 0 to U-1, ascending
    owner   `[U]` row of theta that belongs to the client of each unit
    key     `[M]` seed of the record's dropout mask and augmentation in this step
    place   `[U]` position of each unit within a pass, drawn at random; used for exact isolation
            (privacy/isolation/turns.py)
    """

    row: np.ndarray
    client: np.ndarray
    unit: np.ndarray
    owner: np.ndarray
    key: np.ndarray
    place: np.ndarray

    def chunks(self, limit: int) -> list[DrawnBatch]:
        """Split the batch into parts of at most `limit` records, without splitting a unit.

        A unit with more than `limit` records becomes a separate part.
        """
        pieces: list[DrawnBatch] = []
        counts = np.bincount(self.unit, minlength=len(self.owner))
        ends = np.cumsum(counts)
        first = 0
        while first < len(self.owner):
            start = ends[first] - counts[first]
            last = max(first + 1, int(np.searchsorted(ends, start + limit, side="right")))
            part = slice(start, ends[last - 1])
            units = slice(first, last)
            pieces.append(
                DrawnBatch(
                    row=self.row[part],
                    client=self.client[part],
                    unit=self.unit[part] - first,
                    owner=self.owner[units],
                    key=self.key[part],
                    place=self.place[units],
                )
            )
            first = last
        return pieces


def draw(mechanism: Mechanism, units: int, rng: np.random.Generator) -> Positions:
    """Draw one batch of a client with `units` units; return the positions of the drawn units."""
    if mechanism.sampling == "poisson":
        return np.flatnonzero(rng.random(units) < mechanism.rate)
    return np.sort(rng.choice(units, size=fixed_size(mechanism.rate, units), replace=False))


def fixed_size(rate: float, units: int) -> int:
    """Return the batch size of fixed-size sampling, for a client with `units` units."""
    return max(1, round(rate * units))


def batches(plan: Plan, client: int, rng: np.random.Generator) -> Iterator[Positions]:
    """Yield new batches of a client without end, each as positions among the client's units."""
    units = int(plan.sizes[client])
    mechanism = plan.mechanism(client)
    while True:
        yield draw(mechanism, units, rng)


def joined_batch(
    units: RecordsOfUnits,
    clients: Sequence[int],
    positions: Sequence[Positions],
    places: Sequence[np.ndarray],
    step: int,
) -> DrawnBatch:
    """Join the batches of all clients into one `DrawnBatch`.

    positions  for each client the positions of the units that it drew, among the client's units
    places     for each client the positions of these units in the computation of many records, for
               exact isolation
    step       number of this batch in the round; the keys of dropout and augmentation depend on it
    """
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
        place=np.concatenate(places),
    )


def _keys(positions: Positions, counts: np.ndarray, step: int) -> np.ndarray:
    """Return a key `[M]`, a seed of dropout and augmentation, for each record of a batch.

    A key is computed from the position of the record at its client and from the step. Keys do not
    depend on other clients. Removing a unit shifts the positions of all later units.
    `RecordGradients` therefore combines each key with a secret seed, so that dropout and
    augmentations do not reveal positions.
    """
    unit = np.repeat(positions, counts).astype(np.uint64)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    within = (np.arange(len(unit)) - firsts).astype(np.uint64)
    with np.errstate(over="ignore"):
        record = (unit << np.uint64(20)) + within
        mixed = record * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed + np.uint64(step) * np.uint64(0xD1B54A32D192ED03)
    return np.asarray(mixed.astype(np.int64))

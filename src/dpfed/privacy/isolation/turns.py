"""Divide a batch into passes in which every record has the place that was drawn for its unit.

A pass of exact isolation has m places, and m does not depend on the batch. At a given place, a
record's gradient depends only on the record, its keys, its theta and the place. It is bitwise
independent of the other places (`model/per_sample/places.py` tests this for each model).

Every unit draws its place uniformly and independently of all other units. Deleting a unit
therefore changes nobody's place, so all other gradients stay bitwise equal. Units with the same
place take turns, in successive passes. All passes compute the same function, so the number of the
pass does not matter. No unit is left out, however many units are drawn, and no probability has to
be added to delta.

The records of a unit stay at the unit's place, in their own order. Their gradients are therefore
always added in the same order, and rounding of the unit's mean depends on no other unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpfed.privacy.sampling import DrawnBatch


@dataclass(frozen=True)
class Turn:
    """One pass. Each array has one entry per place, `[m]`.

    record  index of the record in the batch; an empty place repeats a record of the same pass
    used    False for an empty place
    first   True if the record is the first record of its unit
    last    True if the record is the last record of its unit
    """

    record: np.ndarray
    used: np.ndarray
    first: np.ndarray
    last: np.ndarray


def turns_of(batch: DrawnBatch, places: int) -> Iterator[Turn]:
    """Yield the passes of a batch, each with `places` places; none for an empty batch."""
    at = order_at_places(batch.place[batch.unit] % places, places)
    unit = batch.unit
    starts = np.diff(unit, prepend=-1) > 0
    ends = np.diff(unit, append=len(batch.owner)) > 0
    for record in at:
        used = record >= 0
        # An empty place repeats a record, so that no model meets an input unlike all records.
        filled = np.where(used, record, record.max())
        yield Turn(filled, used, starts[filled], ends[filled])


def order_at_places(place: np.ndarray, places: int) -> np.ndarray:
    """Return the indices of the records in each pass, `[passes, places]`; -1 for an empty place.

    place  `[M]` place of each record; records with the same place keep their order
    """
    loads = np.bincount(place, minlength=places)
    order = np.argsort(place, kind="stable")
    turn = np.empty(len(place), dtype=np.int64)
    turn[order] = np.arange(len(place)) - np.repeat(np.cumsum(loads) - loads, loads)
    at = np.full((int(loads.max(initial=0)), places), -1, dtype=np.int64)
    at[turn, place] = np.arange(len(place))
    return at

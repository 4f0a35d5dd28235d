"""Divide a batch into passes in which every record has the place that its unit drew.

A pass is one forward and backward computation of several records. A place is the position of one
record in a pass. A unit is one record, or all records of one person. With exact isolation, deleting
a unit leaves the gradients of all other units bitwise equal.

A pass has m places, and m does not depend on the batch. At a given place, a record's gradient
depends only on the record, its random keys, its client's parameters and the place. It is bitwise
independent of the other places (`model/per_sample/places.py` tests this for each model).

Every unit draws a place uniformly and independently of all other units. Deleting a unit therefore
changes no other unit's place. Units that draw the same place use it in successive passes. All
passes compute the same function, so the number of the pass does not matter. No unit is left out,
however many units are drawn. Exact isolation therefore adds nothing to the delta of differential
privacy.

All records of a unit use the unit's place, in their own order. Their gradients are always added in
this order, so the rounding of the unit's mean depends on no other unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpfed.privacy.sampling import DrawnBatch


@dataclass(frozen=True)
class Turn:
    """The records of one pass, by place. Each array has one entry for each of the m places.

    A unit is one record, or all records of one person.

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
        # An empty place repeats a record, because models may fail on artificial inputs.
        filled = np.where(used, record, record.max())
        yield Turn(filled, used, starts[filled], ends[filled])


def order_at_places(place: np.ndarray, places: int) -> np.ndarray:
    """Return the index of the record at each place, `[passes, places]`; -1 for an empty place.

    place  `[M]` place (0 to `places` - 1) of each of the M records; records with the same place
           keep their order
    """
    loads = np.bincount(place, minlength=places)
    order = np.argsort(place, kind="stable")
    turn = np.empty(len(place), dtype=np.int64)
    turn[order] = np.arange(len(place)) - np.repeat(np.cumsum(loads) - loads, loads)
    at = np.full((int(loads.max(initial=0)), places), -1, dtype=np.int64)
    at[turn, place] = np.arange(len(place))
    return at

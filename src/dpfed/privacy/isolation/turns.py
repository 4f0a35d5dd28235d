"""Divide a batch into passes in which every record has a place of the kind that its unit drew.

A pass is one forward and backward computation of several records. A place is the position of one
record in a pass. A unit is one record, or all records of one person. With exact isolation, deleting
a unit leaves the gradients of all other units bitwise equal.

A pass has m places, and m does not depend on the batch. At a given place, a record's gradient
depends only on the record, its random keys, its client's parameters and the place. It is bitwise
independent of the other places. Place p is of kind p modulo k, and places of one kind give a record
bitwise the same gradient (`model/per_sample/places.py` tests both for each model).

Every unit draws a place uniformly and independently of all other units. It then gets a place of the
same kind. Deleting a unit therefore changes no other unit's kind. Units of one kind fill the places
of this kind, in successive passes. All passes compute the same function, so the number of the pass
does not matter. No unit is left out, however many units are drawn. Exact isolation therefore adds
nothing to the delta of differential privacy.

If units can have several records, each place is a kind of its own. All records of a unit then use
the unit's place, in their own order. Their gradients are always added in this order, so the
rounding of the unit's mean depends on no other unit.
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


def turns_of(batch: DrawnBatch, places: int, kinds: int) -> Iterator[Turn]:
    """Yield the passes of a batch, each with `places` places for records; none for an empty batch.

    kinds  number of kinds of places, a divisor of `places`. Places of one kind give a record
           bitwise the same gradient. If a unit has several records, `kinds` must equal `places`.
    """
    at = order_at_places(batch.place[batch.unit] % kinds, places, kinds)
    unit = batch.unit
    starts = np.diff(unit, prepend=-1) > 0
    ends = np.diff(unit, append=len(batch.owner)) > 0
    for record in at:
        used = record >= 0
        # An empty place repeats a record, because models may fail on artificial inputs.
        filled = np.where(used, record, record.max())
        yield Turn(filled, used, starts[filled], ends[filled])


def order_at_places(kind: np.ndarray, places: int, kinds: int) -> np.ndarray:
    """Return the index of the record at each place of each pass, `[passes, places]`; -1 for empty.

    kind   `[M]` kind of place (0 to `kinds` - 1) that each of the M records needs; records of one
           kind keep their order
    kinds  number of kinds; place p is of kind p modulo `kinds`
    """
    loads = np.bincount(kind, minlength=kinds)
    order = np.argsort(kind, kind="stable")
    turn = np.empty(len(kind), dtype=np.int64)
    turn[order] = np.arange(len(kind)) - np.repeat(np.cumsum(loads) - loads, loads)
    passes = -(-int(loads.max(initial=0)) * kinds // places)
    at = np.full(passes * places, -1, dtype=np.int64)
    at[turn * kinds + kind] = np.arange(len(kind))
    return at.reshape(passes, places)

"""Passes with drawn places: every record once, at the place of its unit and in the unit's order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.privacy.isolation.turns import order_at_places, turns_of
from dpfed.privacy.sampling import DrawnBatch

UNITS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=20)


def batch_of(units: list[tuple[int, int]]) -> DrawnBatch:
    """Return a batch of units with these (records, place) pairs."""
    sizes = np.array([size for size, _ in units], dtype=np.int64)
    unit = np.repeat(np.arange(len(units)), sizes)
    none = np.zeros(len(unit), dtype=np.int64)
    place = np.array([place for _, place in units], dtype=np.int64)
    return DrawnBatch(np.arange(len(unit)), none, unit, 0 * place, none, place)


@given(UNITS, st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_every_record_has_one_turn_at_the_place_of_its_unit(
    units: list[tuple[int, int]], places: int
) -> None:
    batch = batch_of(units)
    turns = list(turns_of(batch, places))
    seen = np.concatenate([turn.record[turn.used] for turn in turns] or [np.zeros(0, np.int64)])
    assert sorted(seen) == list(range(len(batch.row)))
    loads = np.bincount(batch.place[batch.unit] % places, minlength=places)
    assert len(turns) == loads.max()
    for turn in turns:
        assert len(turn.record) == places
        assert turn.used.any()
        at = batch.place[batch.unit[turn.record]] % places
        assert np.array_equal(at[turn.used], np.flatnonzero(turn.used))
        # An empty place repeats a record of the same pass.
        assert set(turn.record) == set(turn.record[turn.used])


@given(UNITS, st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_the_records_of_a_unit_follow_one_another_at_its_place(
    units: list[tuple[int, int]], places: int
) -> None:
    batch = batch_of(units)
    held: list[list[int]] = [[] for _ in range(places)]
    complete: list[list[int]] = []
    for turn in turns_of(batch, places):
        for place in np.flatnonzero(turn.used):
            record = int(turn.record[place])
            assert turn.first[place] == (not held[place])
            held[place].append(record)
            if turn.last[place]:
                complete.append(held[place])
                held[place] = []
    wanted = [list(np.flatnonzero(batch.unit == unit)) for unit in range(len(units))]
    assert sorted(complete) == wanted
    assert not any(held)


@given(UNITS.filter(len), st.integers(1, 6), st.data())
@settings(max_examples=150, deadline=None)
def test_deleting_a_unit_moves_no_other_record_to_another_place(
    units: list[tuple[int, int]], places: int, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, len(units) - 1))

    def at(batch: DrawnBatch, names: np.ndarray) -> dict[int, int]:
        return {
            int(names[turn.record[place]]): int(place)
            for turn in turns_of(batch, places)
            for place in np.flatnonzero(turn.used)
        }

    whole = batch_of(units)
    kept = np.flatnonzero(whole.unit != gone)
    less = batch_of(units[:gone] + units[gone + 1 :])
    before = at(whole, np.arange(len(whole.row)))
    assert at(less, kept) == {record: before[record] for record in kept}


def test_places_without_records_make_no_pass() -> None:
    assert order_at_places(np.zeros(0, dtype=np.int64), 4).shape == (0, 4)
    assert order_at_places(np.array([2, 0, 2]), 4).tolist() == [[1, -1, 0, -1], [-1, -1, 2, -1]]
    assert list(turns_of(batch_of([]), 3)) == []

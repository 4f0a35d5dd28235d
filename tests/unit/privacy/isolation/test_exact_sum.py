"""Exact sums: units of several records, NaN at other places, empty batches, memory."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfed.privacy.clipping import Clipping
from dpfed.privacy.isolation.exact_sum import ExactSum
from dpfed.privacy.sampling import DrawnBatch

CLIP = 1.0


class Gradients:
    """The gradient of record i is row i of `rows`, wherever it stands; notes the passes."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.passes: list[int] = []

    def columns(self, batch: DrawnBatch) -> dict[str, np.ndarray]:
        return {"row": batch.row, "client": batch.client}

    def of_columns(self, theta: Tensor, columns: dict[str, np.ndarray]) -> list[Tensor]:
        self.passes.append(len(columns["row"]))
        found = self.rows[torch.from_numpy(columns["row"])]
        return [found[:, :2].clone(), found[:, 2:].clone()]


def batch_of(sizes: list[int], client: list[int], place: list[int]) -> DrawnBatch:
    unit = np.repeat(np.arange(len(sizes)), sizes)
    owner = np.array(client, dtype=np.int64)
    keys = np.zeros(len(unit), dtype=np.int64)
    return DrawnBatch(
        np.arange(len(unit)), owner[unit], unit, owner, keys, np.array(place, dtype=np.int64)
    )


def sums(rows: Tensor, batch: DrawnBatch, places: int, **how: Any) -> tuple[Tensor, Tensor]:
    gradients: Any = Gradients(rows)
    exact = ExactSum(gradients, places, CLIP, how.get("rule", Clipping()), how.get("steps"))
    return exact.sums(torch.zeros(2, rows.shape[1]), batch, how.get("watch"))


SIZES, CLIENT, PLACE = [1, 3, 2, 1, 2], [0, 0, 1, 1, 1], [2, 2, 0, 1, 2]


@pytest.mark.parametrize("places", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [None, torch.full((2,), 2.0**-30, dtype=torch.float64)])
def test_sums_are_those_of_clipped_means(places: int, steps: Tensor | None) -> None:
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    batch = batch_of(SIZES, CLIENT, PLACE)
    total, count = sums(rows, batch, places, steps=steps, rule=Clipping("quantile"))
    wanted = torch.zeros(2, 5, dtype=torch.float64)
    below = torch.zeros(2, 1, dtype=torch.float64)
    for unit, client in enumerate(CLIENT):
        mean = rows[batch.unit == unit].double().mean(0)
        wanted[client] += mean * min(1.0, CLIP / float(mean.norm()))
        below[client] += 0.5 if float(mean.norm()) <= CLIP else -0.5
    found = total if steps is None else total.double() * 2.0**-30
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14 if steps is None else 1e-8)
    assert torch.equal(count, below)
    assert total.dtype == (torch.float64 if steps is None else torch.int64)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_unit_that_is_not_finite_counts_as_zero_and_leaves_nothing_at_its_place(
    bad: float, places: int
) -> None:
    """Record 2 belongs to unit 1. Unit 4 follows at the same place."""
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    spoilt = rows.clone()
    spoilt[2, 4] = bad
    without = batch_of([1, 2, 1, 2], [0, 1, 1, 1], [2, 0, 1, 2])
    kept = torch.tensor([0, 4, 5, 6, 7, 8])
    total, _ = sums(spoilt, batch_of(SIZES, CLIENT, PLACE), places)
    wanted, _ = sums(rows[kept], without, places)
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-14)


def test_memory_and_passes_do_not_grow_with_a_unit() -> None:
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    gradients: Any = Gradients(rows)
    exact = ExactSum(gradients, 4, CLIP, Clipping(), None)
    total, _ = exact.sums(torch.zeros(2, 5), batch_of([39, 1], [0, 1], [3, 3]))
    assert gradients.passes == [4] * 40
    mean = rows[:39].double().mean(0)
    torch.testing.assert_close(total[0], mean * min(1.0, CLIP / float(mean.norm())))


class Counting(Gradients):
    """Notes how many tensors with a row per place there are when a pass begins."""

    def __init__(self, rows: Tensor, places: int) -> None:
        super().__init__(rows)
        self.places = places
        self.alive: list[int] = []

    def of_columns(self, theta: Tensor, columns: dict[str, np.ndarray]) -> list[Tensor]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is Tensor]
        self.alive.append(sum(x.dim() == 2 and len(x) == self.places for x in tensors))
        return super().of_columns(theta, columns)


@pytest.mark.parametrize("several", [False, True])
def test_memory_follows_from_the_shape_of_a_pass_alone(several: bool) -> None:
    """Neither later passes nor a unit of several records need more than the first pass."""
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    alive = set()
    for sizes in ([1, 1, 1], [1, 2, 3], [1] * 12):
        if not several and max(sizes) > 1:
            continue
        gradients: Any = Counting(rows, places=7)
        exact = ExactSum(gradients, 7, CLIP, Clipping(), None, several)
        exact.sums(torch.zeros(2, 5), batch_of(sizes, [0] * len(sizes), [0] * len(sizes)))
        assert len(gradients.alive) == sum(sizes)
        alive |= set(gradients.alive)
    assert len(alive) == 1


def test_an_empty_batch_has_sum_zero() -> None:
    total, count = sums(torch.zeros(0, 5), batch_of([], [], []), 4)
    assert total.shape == (2, 5)
    assert not total.any()
    assert not count.any()


def test_a_watcher_sees_each_record_once() -> None:
    seen: list[Tensor] = []
    rows = torch.arange(45.0).view(9, 5)
    watch = lambda client, grads: seen.append(torch.cat(list(grads), 1))  # noqa: E731
    sums(rows, batch_of(SIZES, CLIENT, PLACE), 3, watch=watch)
    assert sorted(torch.cat(seen).tolist()) == rows.tolist()

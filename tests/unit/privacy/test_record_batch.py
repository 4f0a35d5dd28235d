"""A record with several augmentations is one mean gradient and one clipped contribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from dpfed.data.partition import Shards, shards_of
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import CLASSIFY
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, PassShape
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import (
    STEP,
    Augmentations,
    PrivateData,
    Records,
    augmentation_keys,
    each_augmentation,
    mean_over_augmentations,
)

torch.set_num_threads(1)
FEATURES, CLASSES = 5, 3


def net(dropout: float = 0.0) -> tuple[PerSample, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = (
            torch.nn.Linear(FEATURES, 4),
            torch.nn.Tanh(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(4, CLASSES),
        )
    model = torch.nn.Sequential(*layers)
    tensors = trainable(model)
    space = space_of(tensors)
    theta = space.flatten(tensors)

    def forward(
        model: torch.nn.Module, weights: dict[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor:
        return call(model, weights, {"input": inputs["x"]})

    return PerSample(
        model,
        space,
        forward,
        CLASSIFY,
    ), theta


def records_of(count: int) -> Records:
    g = torch.Generator().manual_seed(2)
    return Records(
        {"x": torch.randn(count, FEATURES, generator=g) * 3}, torch.arange(count) % CLASSES
    )


def shaken(inputs: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
    """A view by the key alone: shifted by -8 to 7 quarters."""
    return {
        name: x + (keys >> 40).remainder(16).sub(8).unsqueeze(1) / 4 for name, x in inputs.items()
    }


def plan_of(sizes: list[int], clip: float) -> Plan:
    whole = np.array(sizes, dtype=float)
    return Plan("poisson", clip, np.array(sizes), np.ones(len(sizes)), whole, np.zeros(len(sizes)))


def oracle_of(
    model: Any,
    records: Records,
    shards: Shards,
    clip: float,
    views: Augmentations,
    fixed: int = 0,
    max_slots: int = 512,
) -> FleetOracle:
    """Every record in the batch, no noise; through passes of `fixed` slots, or of any size."""
    plan = plan_of(shards.sizes.tolist(), clip)
    clients = list(range(plan.clients))
    size = sum(shape.numel() for shape in model.space.shapes)
    passes = None
    if fixed:
        shape = PassShape(len(clients), fixed, size)
        passes = FixedSum(model, records, Clipping(), views, shape)
    return FleetOracle(
        PrivateData(model, records, shards, views),
        RoundTerms(plan, Streams(0), 1, clients, steps=1),
        PassLimits(max_slots, passes),
    )


def sums_of(oracle: FleetOracle, theta: Tensor) -> Tensor:
    """The clipped sums `[S, P]` of one batch."""
    clients = len(oracle._clients)
    return oracle(theta.repeat(clients, 1))[0].double() * oracle._expected.double()


def keys_of(model: PerSample, records: Records, shards: Shards, theta: Tensor) -> list[int]:
    """Each record's own key: the one it has with a single view."""
    found: list[int] = []

    def note(inputs: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        found.extend(keys.tolist())
        return dict(inputs)

    sums_of(oracle_of(model, records, shards, 1.0, Augmentations(note)), theta)
    return found


def loop_gradient(model: PerSample, theta: Tensor, x: Tensor, label: Tensor) -> Tensor:
    vector = theta.clone().requires_grad_(True)
    scores = functional_call(model.model, model.space.unflatten(vector), (x.unsqueeze(0),))
    (grad,) = torch.autograd.grad(torch.nn.functional.cross_entropy(scores, label.view(1)), vector)
    return grad.double()


def loop_means(
    model: PerSample, theta: Tensor, records: Records, keys: list[int], count: int
) -> Tensor:
    """Return the reference: one forward and backward for each augmentation of each record."""
    means = []
    for row, key in enumerate(keys):
        grads = []
        for number in range(count):
            wrapped = (key + number * STEP + 2**63) % 2**64 - 2**63
            seen = shaken({"x": records.inputs["x"][row : row + 1]}, torch.tensor([wrapped]))["x"][
                0
            ]
            grads.append(loop_gradient(model, theta, seen, records.labels[row]))
        means.append(sum(grads) / count)
    return torch.stack(means)  # type: ignore[arg-type]


def clipped(grads: Tensor, clip: float) -> Tensor:
    return grads * (clip / grads.norm(dim=1, keepdim=True)).clamp(max=1)


WAYS = [{"max_slots": 512}, {"max_slots": 7}, {"max_slots": 1}, {"fixed": 4}, {"fixed": 64}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_mean_over_views_is_clipped_once(way: dict[str, int]) -> None:
    model, theta = net()
    records, shards = records_of(9), shards_of(np.array([0] * 5 + [1] * 4), 2)
    means = loop_means(model, theta, records, keys_of(model, records, shards, theta), 3)
    clip = float(means.norm(dim=1).median())  # some are clipped, some are not
    expected = torch.stack([clipped(means[:5], clip).sum(0), clipped(means[5:], clip).sum(0)])
    found = sums_of(oracle_of(model, records, shards, clip, Augmentations(shaken, 3), **way), theta)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    single = sums_of(oracle_of(model, records, shards, clip, Augmentations(shaken), **way), theta)
    assert float((found - single).norm() / single.norm()) > 0.05  # the views differ


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("clip", [1e-3, 0.3])
def test_one_record_moves_the_sum_by_c_at_most(way: dict[str, int], clip: float) -> None:
    """Without the last record the others keep their keys, and the sum moves by at most C."""
    model, theta = net()
    records = records_of(6)
    everyone, others = (
        shards_of(np.zeros(6, dtype=np.int64), 1),
        shards_of(np.zeros(5, dtype=np.int64), 1),
    )
    views = Augmentations(shaken, 4)
    with_it = sums_of(oracle_of(model, records, everyone, clip, views, **way), theta)
    without = sums_of(oracle_of(model, records, others, clip, views, **way), theta)
    moved = float((with_it - without).norm())
    assert moved <= clip * (1 + 1e-5)
    alone = shards_of(np.zeros(1, dtype=np.int64), 1)
    for row in range(6):
        one = Records(
            {"x": records.inputs["x"][row : row + 1] * 1e3}, records.labels[row : row + 1]
        )
        assert float(
            sums_of(oracle_of(model, one, alone, clip, views, **way), theta).norm()
        ) <= clip * (1 + 1e-6)
    assert (
        moved >= clip * (1 - 1e-5) or clip > 1e-3
    )  # a small C is reached, so that the bound is a real one


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_view_that_is_no_number_loses_its_record_and_no_other(way: dict[str, int]) -> None:
    model, theta = net()
    records, shards = records_of(4), shards_of(np.zeros(4, dtype=np.int64), 1)
    bad = keys_of(model, records, shards, theta)[3] + STEP  # the second view of the last record
    bad = (bad + 2**63) % 2**64 - 2**63

    def broken(inputs: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.where((keys == bad).unsqueeze(1), torch.nan, x)
            for name, x in shaken(inputs, keys).items()
        }

    found = sums_of(oracle_of(model, records, shards, 0.3, Augmentations(broken, 3), **way), theta)
    three = shards_of(np.zeros(3, dtype=np.int64), 1)
    expected = sums_of(oracle_of(model, records, three, 0.3, Augmentations(shaken, 3)), theta)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_slots", [1, 7, 512])
def test_a_unit_is_the_mean_of_its_records_which_are_means_of_their_views(max_slots: int) -> None:
    model, theta = net()
    records, units = records_of(6), np.array([0, 0, 0, 1, 2, 2])
    shards = shards_of(np.zeros(6, dtype=np.int64), 1, units)
    keys = keys_of(model, records, shards, theta)
    rows = [int(row) for row in shards.of(0)]
    taken = Records({"x": records.inputs["x"][rows]}, records.labels[rows])
    means = loop_means(model, theta, taken, keys, 2)
    whole = torch.stack([means[[units[row] == u for row in rows]].mean(0) for u in range(3)])
    clip = float(whole.norm(dim=1).median())
    found = sums_of(
        oracle_of(model, records, shards, clip, Augmentations(shaken, 2), max_slots=max_slots),
        theta,
    )
    torch.testing.assert_close(found[0], clipped(whole, clip).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [{"max_slots": 512}, {"fixed": 3}], ids=str)
def test_every_view_has_a_mask_of_its_own(
    way: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, theta = net(0.5)
    seen: list[int] = []
    for name in ("grads", "raw_grads"):
        right = getattr(PerSample, name)

        def noted(
            self: Any,
            theta: Any,
            client: Any,
            inputs: Any,
            labels: Any,
            keys: Any,
            right: Any = right,
        ) -> Any:
            seen.extend(keys.tolist() if right.__name__ == "raw_grads" else [])
            return right(self, theta, client, inputs, labels, keys)

        monkeypatch.setattr(PerSample, name, noted)
    records, shards = records_of(6), shards_of(np.zeros(6, dtype=np.int64), 1)
    sums_of(oracle_of(model, records, shards, 1.0, Augmentations(shaken, 4), **way), theta)
    assert len(set(seen)) == len(seen) == 24


def test_views_count_as_rows_of_a_pass_and_those_of_a_record_stay_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, theta = net()
    records, shards = records_of(5), shards_of(np.zeros(5, dtype=np.int64), 1)
    right, rows = PerSample.grads, []

    def noted(self: Any, theta: Tensor, client: Tensor, *rest: Any) -> Any:
        rows.append(len(client))
        if len(client) > room:
            raise torch.OutOfMemoryError("out of memory")
        return right(self, theta, client, *rest)

    monkeypatch.setattr(PerSample, "grads", noted)
    room = 100
    expected = sums_of(
        oracle_of(model, records, shards, 0.3, Augmentations(shaken, 4), max_slots=9), theta
    )
    assert rows == [8, 8, 4]
    rows.clear()
    room = 4
    found = sums_of(
        oracle_of(model, records, shards, 0.3, Augmentations(shaken, 4), max_slots=16), theta
    )
    assert rows == [16, 8, 4, 4, 4, 4, 4]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    rows.clear()
    room = 3
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing left to halve
        sums_of(
            oracle_of(model, records, shards, 0.3, Augmentations(shaken, 4), max_slots=8), theta
        )
    assert rows == [8, 4]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 40))
def test_keys_of_views_are_all_different_and_begin_with_the_records(key: int, count: int) -> None:
    found = augmentation_keys(torch.tensor([key]), count).tolist()
    assert found == [(key + number * STEP + 2**63) % 2**64 - 2**63 for number in range(count)]
    assert len(set(found)) == count


def test_means_by_hand() -> None:
    grads = [
        torch.tensor([[1.0], [3.0], [5.0], [-5.0], [1.0], [torch.inf]]),
        torch.ones(6, 2, dtype=torch.bfloat16),
    ]
    one, two = mean_over_augmentations(grads, 2)
    assert one.tolist() == [[2.0], [0.0], [torch.inf]]
    assert two.tolist() == [[1.0, 1.0]] * 3
    assert two.dtype == torch.float32  # the mean of two bfloat16 numbers is seldom one
    assert mean_over_augmentations(grads, 1)[1] is grads[1]
    assert mean_over_augmentations([torch.zeros(0, 4)], 3)[0].shape == (0, 4)
    assert each_augmentation(torch.tensor([7, 8]), 3).tolist() == [7, 7, 7, 8, 8, 8]

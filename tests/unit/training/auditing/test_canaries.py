"""Canaries have orthogonal gradients in many tensors, and all other records keep their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfed.config import load
from dpfed.data.partition import shards_of
from dpfed.model.parameter_vector import space_of
from dpfed.privacy.record_batch import Augmentations
from dpfed.registry import registry
from dpfed.training.auditing.canaries import (
    CODE,
    canary_codes,
    directions_for,
    most_canaries,
    with_canaries,
)
from dpfed.training.job.job import Job, prepare

torch.set_num_threads(1)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def job(*more: str) -> Job:
    return prepare(load("digits", ["data.clients=4", *more], registry()))


def test_no_coordinate_is_used_twice() -> None:
    space = space_of({"a": torch.zeros(40, 10), "b": torch.zeros(30)})
    found = directions_for(space, 20, rng())
    assert found.coordinates.shape == found.signs.shape == (20, 16)
    used = np.concatenate([found.coordinates.reshape(-1), found.free])
    assert len(np.unique(used)) == len(used) == 20 * 17
    assert set(found.signs.reshape(-1)) == {-1.0, 1.0}


def test_a_canary_lies_in_as_many_tensors_as_possible() -> None:
    space = space_of({f"t{i}": torch.zeros(50) for i in range(20)})
    coordinates = directions_for(space, 10, rng()).coordinates
    assert all(len(set(row // 50)) == 16 for row in coordinates)


@pytest.mark.parametrize(("size", "canaries", "each"), [(34, 2, 16), (20, 2, 9), (3, 2, 1)])
def test_canaries_of_a_small_vector_have_fewer_coordinates(
    size: int, canaries: int, each: int
) -> None:
    found = directions_for(space_of({"a": torch.zeros(size)}), canaries, rng())
    assert found.coordinates.shape == (canaries, each)
    assert len(found.free) >= 1
    assert most_canaries(size) == max(1, size // 17)


def test_measured_components_are_those_of_the_directions() -> None:
    found = directions_for(space_of({"a": torch.zeros(200)}), 5, rng())
    sums = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    vectors = np.zeros((5, 200))
    np.put_along_axis(vectors, found.coordinates, found.signs / 4, axis=1)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0)
    assert found.along(sums) == pytest.approx(sums.double().numpy() @ vectors.T)
    assert found.beside(sums) == pytest.approx(sums.numpy()[:, found.free])
    assert vectors[:, found.free] == pytest.approx(0.0)


def test_all_records_of_a_unit_have_its_code() -> None:
    owner = np.array([0, 0, 0, 1, 1, 1])
    shards = shards_of(owner, 2, np.array(["a", "a", "b", "c", "d", "d"]))
    codes = canary_codes(shards, np.array([[0], [1]]), np.array([[1.0], [-1.0]]), 6)
    assert codes.tolist() == [1, 1, 0, 0, -1, -1]


@pytest.mark.parametrize("raw", [False, True], ids=["grads", "raw_grads"])
def test_only_canaries_get_other_gradients(raw: bool) -> None:
    plain = job()
    directions = directions_for(plain.space, 3, rng())
    codes = np.zeros(len(plain.private.records.labels), dtype=np.int64)
    codes[[0, 3, 4]] = [2, -3, 1]
    audited = with_canaries(plain, directions, codes)
    rows = torch.arange(6)
    client = torch.tensor([0, 1, 0, 1, 0, 1])
    theta = torch.stack([plain.theta, plain.theta + 0.1])
    own = torch.cat(plain.model.grads(theta, client, *plain.private.records.take(rows)), 1)
    compute = audited.model.raw_grads if raw else audited.model.grads
    parts = compute(theta, client, *audited.private.records.take(rows))
    assert [g.shape[1] for g in parts] == [shape.numel() for shape in plain.space.shapes]
    found = audited.model.ordered(torch.cat(parts, 1))
    others = [1, 2, 5]
    assert torch.equal(found[others], own[others])
    components = directions.along(found[[0, 3, 4]])
    # The norm is 1,000 expected batches times C.
    assert np.abs(components).max(1) == pytest.approx(16e3)
    assert components / 16e3 == pytest.approx(np.array([[0, 1, 0], [0, 0, -1], [1, 0, 0]]))
    assert found[[0, 3, 4]].norm(dim=1).numpy() == pytest.approx(16e3)


def test_augmentations_do_not_change_the_codes() -> None:
    plain = job("data.augment=flip", "data.views=3")
    audited = with_canaries(
        plain, directions_for(plain.space, 2, rng()), np.arange(len(plain.private.records.labels))
    )
    assert isinstance(audited.private.augmentations, Augmentations)
    assert audited.private.augmentations.count == 3
    inputs, _ = audited.private.records.take(torch.arange(4))
    keys = torch.arange(4)
    found = audited.private.augmentations.augment(inputs, keys)
    assert found.pop(CODE).tolist() == [0, 1, 2, 3]
    del inputs[CODE]
    assert plain.private.augmentations is not None
    expected = plain.private.augmentations.augment(inputs, keys)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert set(found) == set(expected)

"""Gradient canaries: records of a job whose gradients the auditor chooses.

A canary is a unit of a client for which a fair coin decides if it is in the data. All its records
have the same gradient: equally large numbers at a few coordinates of the trainable vector, and zero
elsewhere. Its norm is about 1e3·B·C, so clipping must reduce it to C. No two canaries of a client
share a coordinate, so their gradients are orthogonal. The coordinates of a canary lie in as many
tensors as possible. If a bug clips each of 16 tensors to C, a canary has norm 4 C.

All other records keep their own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dpfed.data.partition import Shards
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.record_batch import Augmentations, Records
from dpfed.training.job.job import Job

# Most coordinates of one canary.
MOST_COORDINATES = 16
# Name of the input that says which canary a record is. The record of canary j has the number j + 1,
# its opposite has -(j + 1), and all other records have 0.
CODE = "canary_code"


@dataclass(frozen=True)
class Directions:
    """The gradients of the canaries, and coordinates at which no canary has a gradient.

    coordinates  `[canaries, any number]` coordinates of each canary
    signs        `[canaries, the same number]` their signs, 1 or -1
    free         coordinates of no canary, as many as there are canaries
    """

    coordinates: np.ndarray
    signs: np.ndarray
    free: np.ndarray

    def along(self, sums: Tensor) -> np.ndarray:
        """Return inner products of sums `[S, P]` with the canaries' directions, `[S, canaries]`."""
        values = _columns(sums, self.coordinates) * self.signs
        return np.asarray(values.sum(2) / sqrt(self.coordinates.shape[1]))

    def beside(self, sums: Tensor) -> np.ndarray:
        """Return the numbers of sums `[S, P]` at the free coordinates."""
        return _columns(sums, self.free)


def _columns(sums: Tensor, coordinates: np.ndarray) -> np.ndarray:
    chosen = sums[:, torch.from_numpy(coordinates).to(sums.device)]
    return np.asarray(chosen.double().cpu().numpy())


def most_canaries(size: int) -> int:
    """Return how many canaries with many coordinates fit into a vector of this size."""
    return max(1, size // (MOST_COORDINATES + 1))


def directions_for(space: Space, canaries: int, rng: np.random.Generator) -> Directions:
    """Choose coordinates at random. Neighbours in the list of coordinates lie in other tensors."""
    tensor = np.repeat(np.arange(len(space.shapes)), [shape.numel() for shape in space.shapes])
    shuffled = rng.permutation(space.size)
    by_tensor = shuffled[np.argsort(tensor[shuffled], kind="stable")]
    counts = np.bincount(tensor)
    # The rank of a coordinate in its tensor. Equal ranks of all tensors stand side by side.
    rank = np.arange(space.size) - np.repeat(np.cumsum(counts) - counts, counts)
    dealt = by_tensor[np.argsort(rank, kind="stable")]
    each = max(1, min(MOST_COORDINATES, (space.size - canaries) // canaries))
    used = dealt[: canaries * each].reshape(canaries, each)
    signs = rng.choice([-1.0, 1.0], used.shape)
    return Directions(used, signs, dealt[canaries * each :][:canaries])


class CanaryModel:
    """The model of a job, in which the gradients of canaries are replaced.

    size  absolute value of a canary's gradient at each of its coordinates
    """

    def __init__(self, model: PerSample, directions: Directions, size: float) -> None:
        device = model.space.blocks.device
        self._model = model
        self._coordinates = torch.from_numpy(directions.coordinates).to(device)
        self._values = torch.from_numpy(directions.signs * size).to(device)
        self.space = model.space
        self.has_dropout = model.has_dropout
        self.places = model.places
        self.kinds = model.kinds

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        others = {name: x for name, x in inputs.items() if name != CODE}
        grads = torch.cat(self._model.grads(theta, client, others, labels, keys), 1)
        code = inputs[CODE]
        canary = (code.abs() - 1).clamp_min(0)
        # A record that is no canary keeps its gradient, and zeros are added to it.
        grads.masked_fill_((code != 0).unsqueeze(1), 0.0)
        values = self._values[canary] * code.sign().unsqueeze(1)
        grads.scatter_add_(1, self._coordinates[canary], values.to(grads))
        return [grads[:, part] for part in self.space.slices()]

    def raw_grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        return self.grads(theta, client, inputs, labels, keys)

    def ordered(self, raw: Tensor) -> Tensor:
        return raw


def canary_codes(
    shards: Shards, positions: np.ndarray, signs: np.ndarray, records: int
) -> np.ndarray:
    """Return the value of the input CODE for each record.

    positions  `[clients, canaries]` the units of each client that are canaries
    signs      `[clients, canaries]` -1 for the opposite of a canary
    """
    codes = np.zeros(records, dtype=np.int64)
    numbers = np.arange(1, positions.shape[1] + 1)
    for client, (units, sign) in enumerate(zip(positions, signs, strict=True)):
        rows, counts = shards.slots(client, units)
        codes[rows] = np.repeat(np.where(sign < 0, -numbers, numbers), counts)
    return codes


def with_canaries(job: Job, directions: Directions, codes: np.ndarray) -> Job:
    """Return the job with canaries among its records."""
    size = 1e3 * float(job.plan.expected.max()) * job.plan.clip
    model = CanaryModel(job.model, directions, size / sqrt(directions.coordinates.shape[1]))
    private = job.private
    code = torch.from_numpy(codes).to(private.records.labels.device)
    records = Records({**private.records.inputs, CODE: code}, private.records.labels)
    augmentations = private.augmentations and _without_code(private.augmentations)
    return replace(
        job,
        model=cast(PerSample, model),
        private=replace(private, records=records, augmentations=augmentations),
    )


def _without_code(view: Augmentations) -> Augmentations:
    """Return augmentations that leave the input CODE as it is."""

    def augment(inputs: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        others = {name: x for name, x in inputs.items() if name != CODE}
        return {**view.augment(others, keys), CODE: inputs[CODE]}

    return Augmentations(augment, view.count)

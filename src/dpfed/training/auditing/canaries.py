"""Gradient canaries: records of a job whose gradients the auditor chooses.

A canary is a unit (one record, or all records of one person) for which a fair coin decides if it is
in the data. All its records have the same gradient: equally large numbers at a few coordinates of
the trainable vector, and zero elsewhere. The norm of this gradient is about 1e3·B·C, with expected
batch size B and clip norm C, so clipping must reduce it to C. Two canaries of a client have no
coordinate in common, so their gradients are orthogonal. The coordinates of a canary lie in as many
tensors as possible. If a bug clips each of 16 tensors to C, the canary's clipped norm is 4 C.

Records that are no canaries keep their own gradients.
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

# Largest number of coordinates at which one canary has a gradient.
MOST_COORDINATES = 16
# Name of a model input that marks canaries: its value is j + 1 for records of canary j, -(j + 1)
# for records with the opposite gradient, and 0 for records that are no canaries.
CODE = "canary_code"


@dataclass(frozen=True)
class Directions:
    """Directions of the canaries' gradients in the trainable vector `[P]`, each of length 1.

    coordinates  `[canaries, n]` the coordinates at which each canary has a gradient
    signs        `[canaries, n]` signs of the gradient at these coordinates, 1 or -1
    free         coordinates at which no canary has a gradient, about one for each canary
    """

    coordinates: np.ndarray
    signs: np.ndarray
    free: np.ndarray

    def along(self, sums: Tensor) -> np.ndarray:
        """Return the components of gradient sums along each canary's direction, `[S, canaries]`.

        sums  `[S, P]` one sum of P trainable numbers for each of S clients
        """
        values = _columns(sums, self.coordinates) * self.signs
        return np.asarray(values.sum(2) / sqrt(self.coordinates.shape[1]))

    def beside(self, sums: Tensor) -> np.ndarray:
        """Return the entries of gradient sums `[S, P]` at `free`, where no canary changes them."""
        return _columns(sums, self.free)


def _columns(sums: Tensor, coordinates: np.ndarray) -> np.ndarray:
    chosen = sums[:, torch.from_numpy(coordinates).to(sums.device)]
    return np.asarray(chosen.double().cpu().numpy())


def most_canaries(size: int) -> int:
    """Return how many canaries fit into a trainable vector of `size` numbers.

    Each canary needs MOST_COORDINATES coordinates, and one free coordinate to measure noise.
    """
    return max(1, size // (MOST_COORDINATES + 1))


def directions_for(space: Space, canaries: int, rng: np.random.Generator) -> Directions:
    """Choose random coordinates and signs for the gradients of all canaries.

    The coordinates of a canary lie in as many tensors as possible.
    """
    tensor = np.repeat(np.arange(len(space.shapes)), [shape.numel() for shape in space.shapes])
    shuffled = rng.permutation(space.size)
    by_tensor = shuffled[np.argsort(tensor[shuffled], kind="stable")]
    counts = np.bincount(tensor)
    # Number the coordinates of each tensor from 0. Sorting all coordinates by this number takes one
    # coordinate of each tensor in turn.
    rank = np.arange(space.size) - np.repeat(np.cumsum(counts) - counts, counts)
    dealt = by_tensor[np.argsort(rank, kind="stable")]
    each = max(1, min(MOST_COORDINATES, (space.size - canaries) // canaries))
    used = dealt[: canaries * each].reshape(canaries, each)
    signs = rng.choice([-1.0, 1.0], used.shape)
    return Directions(used, signs, dealt[canaries * each :][:canaries])


class CanaryModel:
    """The model of a job, with gradients of canaries that the auditor chose.

    It computes the gradients of all other records as before.

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
        # Set the gradients of canaries to zero first, and then add the chosen gradients. Other
        # records have code 0 and add zeros, so their gradients do not change.
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
    """Return the value of the model input CODE for each record, which marks canaries.

    positions  `[clients, canaries]` the units of each client that are canaries
    signs      `[clients, canaries]` -1 for a canary that gets the opposite gradient, else 0 or 1
    records    number of all records
    """
    codes = np.zeros(records, dtype=np.int64)
    numbers = np.arange(1, positions.shape[1] + 1)
    for client, (units, sign) in enumerate(zip(positions, signs, strict=True)):
        rows, counts = shards.slots(client, units)
        codes[rows] = np.repeat(np.where(sign < 0, -numbers, numbers), counts)
    return codes


def with_canaries(job: Job, directions: Directions, codes: np.ndarray) -> Job:
    """Return the job with a model that gives canaries their gradients.

    codes  value of the model input CODE for each record, which marks canaries
    """
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
    """Return the augmentations without effect on the input CODE, which marks canaries."""

    def augment(inputs: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        others = {name: x for name, x in inputs.items() if name != CODE}
        return {**view.augment(others, keys), CODE: inputs[CODE]}

    return Augmentations(augment, view.count)

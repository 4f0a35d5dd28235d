"""Per-record gradients of a drawn batch: the records, the model that differentiates them, and keys.

A key names the dropout masks and the random augmentation of a record in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpfed.privacy.noise import Purpose, Streams
from dpfed.privacy.sampling import DrawnBatch, RecordsOfUnits

Augment = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
"""(inputs, keys) -> inputs: one random augmentation of each record, chosen by its key."""
# Difference between the keys of a record's augmentations; odd, so that no two keys are equal.
STEP = 0x2545F4914F6CDD1D


class Tensors(Protocol):
    """The trainable tensors in the order of the flat vector (model/parameter_vector.py)."""

    @property
    def shapes(self) -> Sequence[torch.Size]: ...


class Gradients(Protocol):
    """Per-record gradients `[M, n]` of each trainable tensor (model/per_sample/gradients.py)."""

    @property
    def space(self) -> Tensors: ...

    @property
    def has_dropout(self) -> bool: ...

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]: ...

    def raw_grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the numbers of `grads`; inside a tensor their order may differ."""

    def ordered(self, raw: Tensor) -> Tensor:
        """Bring sums `[S, P]` of `raw_grads` into the order of `space`, possibly in place."""


@dataclass(frozen=True)
class Augmentations:
    """How many random augmentations of a record stand for it, and the function that makes them.

    The gradient of a record is the mean over its augmentations, before it is clipped (De et al.
    2022). A record stays one contribution of norm at most C, so noise and accounts do not change.
    """

    augment: Augment
    count: int = 1


def each_augmentation(of_records: Tensor, count: int) -> Tensor:
    """Repeat a value per record for each of its augmentations: `[M]` -> `[M*count]`."""
    return of_records.unsqueeze(1).expand(-1, count).reshape(-1)


def augmentation_keys(keys: Tensor, count: int) -> Tensor:
    """Return keys of all augmentations `[M*count]`; the first has the key of its record."""
    return (keys.unsqueeze(1) + STEP * torch.arange(count, device=keys.device)).reshape(-1)


def mean_over_augmentations(grads: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the mean gradient of each record in float32: `[M*count, n]` -> `[M, n]`.

    If one augmentation has a non-finite gradient, so has the mean.
    """
    if count == 1:
        return list(grads)
    return [
        g.reshape(len(g) // count, count, g.shape[1]).mean(1, dtype=torch.float32) for g in grads
    ]


@dataclass(frozen=True)
class Records:
    """All records of the clients, on the device: inputs by name, and labels."""

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def take(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs and labels of these records."""
        inputs = {name: x.index_select(0, rows) for name, x in self.inputs.items()}
        return inputs, self.labels.index_select(0, rows)


@dataclass(frozen=True)
class PrivateData:
    """The private records, the units that they belong to, and how a model sees them."""

    gradients: Gradients
    records: Records
    units: RecordsOfUnits
    augmentations: Augmentations | None = None


@dataclass(frozen=True)
class AugmentedRecords:
    """Records, each of which a model sees as its augmentations."""

    model: Gradients
    records: Records
    augmentations: Augmentations | None

    @property
    def count(self) -> int:
        """The number of augmentations of a record."""
        return 1 if self.augmentations is None else self.augmentations.count

    def mean_gradients(
        self,
        compute: Callable[..., list[Tensor]],
        theta: Tensor,
        client: Tensor,
        row: Tensor,
        dropout: Tensor,
        augment: Tensor,
    ) -> list[Tensor]:
        """Return the mean gradient `[M, n]` of each record over its augmentations, in one pass.

        compute           `grads` or `raw_grads` of the model
        client            `[M]` the row of theta at which each gradient is taken
        row               `[M]` the records
        dropout, augment  `[M]` their keys
        """
        count = self.count
        inputs, labels = self.records.take(each_augmentation(row, count))
        if self.augmentations is not None:
            inputs = self.augmentations.augment(inputs, augmentation_keys(augment, count))
        keys = None
        if self.model.has_dropout:
            keys = augmentation_keys(dropout, count)
        grads = compute(theta, each_augmentation(client, count), inputs, labels, keys)
        return mean_over_augmentations(grads, count)


class RecordGradients:
    """Per-record gradients for the clients of one round."""

    def __init__(
        self, data: PrivateData, streams: Streams, round: int, clients: Sequence[int]
    ) -> None:
        def seeds(purpose: Purpose) -> np.ndarray:
            return np.array([streams.number(purpose, round, client) for client in clients])

        self._records = AugmentedRecords(data.gradients, data.records, data.augmentations)
        self.augmentations = self._records.count
        self.dropout_seeds = np.zeros(len(clients), dtype=np.int64)
        self.augment_seeds = self.dropout_seeds
        if data.gradients.has_dropout:
            self.dropout_seeds = seeds("dropout")
        if data.augmentations is not None:
            self.augment_seeds = seeds("augment")

    def of_records(self, theta: Tensor, client: Tensor, batch: DrawnBatch) -> list[Tensor]:
        """Return the gradients `[M, n]` of these records from one pass.

        client  `[M]` the row of theta at which each gradient is taken
        """
        names = ("row", "dropout", "augment")
        columns = self.columns(batch)
        row, dropout, augment = (torch.from_numpy(columns[n]).to(client.device) for n in names)
        compute = self._records.model.grads
        return self._records.mean_gradients(compute, theta, client, row, dropout, augment)

    def of_unit(self, theta: Tensor, batch: DrawnBatch) -> list[Tensor]:
        """Return the mean gradient `[1, n]` of one unit in float64, from one pass per record.

        Its memory does not grow with the unit, so no unit can make a round fail.
        """
        own = int(batch.client[0])
        first_row = torch.zeros(1, dtype=torch.int64, device=theta.device)
        shapes = self._records.model.space.shapes
        total = [theta.new_zeros(1, shape.numel(), dtype=torch.float64) for shape in shapes]
        for i in range(len(batch.row)):
            grads = self.of_records(theta[own : own + 1], first_row, batch.single(i))
            for summed, grad in zip(total, grads, strict=True):
                summed += grad
        return [summed / len(batch.row) for summed in total]

    def columns(self, batch: DrawnBatch) -> dict[str, np.ndarray]:
        """Return records, clients and secret keys, as passes of a fixed shape take them."""
        return {
            "row": batch.row,
            "client": batch.client,
            "dropout": batch.key ^ self.dropout_seeds[batch.client],
            "augment": batch.key ^ self.augment_seeds[batch.client],
        }

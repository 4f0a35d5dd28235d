"""Compute the gradient of each record of a drawn batch.

A key is a 64-bit seed: it decides the dropout mask or the augmentation of one record in one step.
In shapes, M is the number of records, S the number of clients and P the number of parameters.
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
"""(inputs, keys) -> inputs: replaces each record by a random augmentation that its key decides."""
# Augmentation i of a record has the record's key plus i times STEP, modulo 2^64. STEP is odd, so
# no two augmentations of a record have equal keys.
STEP = 0x2545F4914F6CDD1D


class Tensors(Protocol):
    """Shapes of the trainable tensors, in the order in which they form the flat vector of length P.

    P is the number of all trainable numbers.
    """

    @property
    def shapes(self) -> Sequence[torch.Size]: ...


class Gradients(Protocol):
    """Computes the gradients of M records: `[M, n]` for each trainable tensor of n numbers."""

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
        """Return the gradients of `grads`, but the numbers of each tensor may be in another order.

        This saves a copy. After the gradients are summed, `ordered` restores the order.
        """

    def ordered(self, raw: Tensor) -> Tensor:
        """Return sums of gradients from `raw_grads` with their numbers in the order of `grads`.

        This method may overwrite `raw`.

        raw  `[S, P]` sums of P numbers for S clients
        """


@dataclass(frozen=True)
class Augmentations:
    """Augmentation multiplicity: average each record's gradient over `count` random augmentations.

    The mean gradient of a record is clipped as one gradient (De et al. 2022). One record therefore
    still contributes at most the clip norm C, and augmentations do not change the noise or the
    privacy accounting.
    """

    augment: Augment
    count: int = 1


def each_augmentation(of_records: Tensor, count: int) -> Tensor:
    """Repeat each record's value for each of its augmentations: `[M]` -> `[M*count]`."""
    return of_records.unsqueeze(1).expand(-1, count).reshape(-1)


def augmentation_keys(keys: Tensor, count: int) -> Tensor:
    """Return a key (seed) for each of `count` augmentations of each record: `[M]` -> `[M*count]`.

    The first augmentation of a record has the record's own key.
    """
    return (keys.unsqueeze(1) + STEP * torch.arange(count, device=keys.device)).reshape(-1)


def mean_over_augmentations(grads: Sequence[Tensor], count: int) -> list[Tensor]:
    """Average the gradients of each record's augmentations: `[M*count, n]` -> `[M, n]` in float32.

    If the gradient of one augmentation is not finite, the mean of its record is not finite.
    """
    if count == 1:
        return list(grads)
    return [
        g.reshape(len(g) // count, count, g.shape[1]).mean(1, dtype=torch.float32) for g in grads
    ]


@dataclass(frozen=True)
class Records:
    """The records of all clients, stored on the device: tensors of inputs by name, and labels."""

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def take(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs and labels of the records with these indices."""
        inputs = {name: x.index_select(0, rows) for name, x in self.inputs.items()}
        return inputs, self.labels.index_select(0, rows)


@dataclass(frozen=True)
class PrivateData:
    """Everything that the oracle needs to compute gradients of private records.

    gradients      computes per-record gradients of the model
    records        the records of all clients
    units          assigns records to protected units
    augmentations  random augmentations of each record; None for none
    """

    gradients: Gradients
    records: Records
    units: RecordsOfUnits
    augmentations: Augmentations | None = None


@dataclass(frozen=True)
class AugmentedRecords:
    """Computes per-record gradients that are averaged over the augmentations of each record."""

    model: Gradients
    records: Records
    augmentations: Augmentations | None

    @property
    def count(self) -> int:
        """The number of augmentations of each record; 1 if there are none."""
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
        """Return the gradient of each of M records, averaged over its augmentations, `[M, n]`.

        One forward and backward computation of all records gives the gradients.

        compute  the method `grads` or `raw_grads` of the model
        theta    `[S, P]` one parameter vector per client
        client   `[M]` the row of theta at which each gradient is computed
        row      `[M]` indices of the records
        dropout  `[M]` key of each record's dropout mask
        augment  `[M]` key of each record's augmentation
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
    """Computes per-record gradients in one round, with the secret seeds of the round's clients."""

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

    def of_records(self, theta: Tensor, batch: DrawnBatch) -> list[Tensor]:
        """Return the gradient of each of the M records of a batch: `[M, n]` for each tensor."""
        return self.of_columns(theta, self.columns(batch))

    def of_columns(self, theta: Tensor, columns: Mapping[str, np.ndarray]) -> list[Tensor]:
        """Return the gradient of each of the M records that the columns describe, `[M, n]`.

        columns  arrays `[M]` by name, as the method `columns` returns them
        """
        on_device = {name: torch.from_numpy(x).to(theta.device) for name, x in columns.items()}
        compute = self._records.model.grads
        return self._records.mean_gradients(compute, theta, **on_device)

    def columns(self, batch: DrawnBatch) -> dict[str, np.ndarray]:
        """Return four arrays with one entry for each of the M records of a batch.

        The entries of a record are its index, its client's row of theta, its dropout key and its
        augmentation key.
        """
        return {
            "row": batch.row,
            "client": batch.client,
            "dropout": batch.key ^ self.dropout_seeds[batch.client],
            "augment": batch.key ^ self.augment_seeds[batch.client],
        }

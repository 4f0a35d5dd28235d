"""What the oracle is made of besides the plan: the records, who holds them, and how a model differentiates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Tensors(Protocol):
    """The trainable tensors in the order of the flat vector (model/space.py)."""

    @property
    def shapes(self) -> Sequence[torch.Size]: ...


class Gradients(Protocol):
    """Per-sample gradients `[M, n]` for each trainable tensor (model/per_sample.py)."""

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
        """The same numbers as they come, tensor by tensor; the numbers of a tensor may have another order."""

    def ordered(self, raw: Tensor) -> Tensor:
        """`[S, P]` with coordinates as those of `raw_grads`, in the order of the space; may be the same tensor."""


View = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
"""(inputs, keys) -> inputs: a random view of each record, by its key."""
STEP = 0x2545F4914F6CDD1D  # between the keys of a record's views; odd, so that no two of them are the same


@dataclass(frozen=True)
class Augmentations:
    """As what a record is seen each time it is in a batch: so many random views, each by a key of its own.

    The record's gradient is the mean over its views, taken before it is clipped (De, Berrada, Hayes, Smith, Balle 2022). One
    record is still one contribution of norm at most C, so sampling, noise and accounts know nothing of views.
    """

    view: View
    count: int = 1


def each_augmentation(of_records: Tensor, count: int) -> Tensor:
    """`[M]` -> `[M*count]`: what is known of a record, for each of its views; the views of a record lie together."""
    return of_records.unsqueeze(1).expand(-1, count).reshape(-1)


def augmentation_keys(keys: Tensor, count: int) -> Tensor:
    """The keys of the records' views `[M*count]`; the first view has the record's own key."""
    return (keys.unsqueeze(1) + STEP * torch.arange(count, device=keys.device)).reshape(-1)


def mean_over_augmentations(grads: Sequence[Tensor], count: int) -> list[Tensor]:
    """Gradients of views `[M*count, n]` -> of records `[M, n]`, in float32. One view that is no number makes the mean none."""
    if count == 1:
        return list(grads)
    return [
        g.reshape(len(g) // count, count, g.shape[1]).mean(1, dtype=torch.float32) for g in grads
    ]


class Holdings(Protocol):
    """Who holds what (data/partition.py)."""

    def slots(self, client: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Records:
    """The records themselves, on the device: inputs by name and labels, row by row."""

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def take(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {
            name: x.index_select(0, rows) for name, x in self.inputs.items()
        }, self.labels.index_select(0, rows)

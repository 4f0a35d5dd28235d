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
        self, theta: Tensor, client: Tensor, inputs: Mapping[str, Tensor], labels: Tensor, keys: Tensor | None = None
    ) -> list[Tensor]: ...

    def raw_grads(
        self, theta: Tensor, client: Tensor, inputs: Mapping[str, Tensor], labels: Tensor, keys: Tensor | None = None
    ) -> list[Tensor]:
        """The same numbers as they come: coordinate i of the space is at `raw_order[i]`."""

    @property
    def raw_order(self) -> Tensor: ...


View = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
"""(inputs, keys) -> inputs: a random view of each record, by its key."""


class Holdings(Protocol):
    """Who holds what (data/partition.py)."""

    def slots(self, client: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Records:
    """The records themselves, on the device: inputs by name and labels, row by row."""

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def take(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {name: x.index_select(0, rows) for name, x in self.inputs.items()}, self.labels.index_select(0, rows)

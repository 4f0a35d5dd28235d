"""What `build` gives: the module, the name of its head, and how raw inputs enter it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Prepare = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Built:
    model: nn.Module
    head: str
    prepare: Prepare


def fresh_head(width: int, classes: int) -> nn.Linear:
    """A classifier that starts at zero: the classes of the pretraining are not those of the clients."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def normalise(name: str, white: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Prepare:
    """uint8 images -> float, with public constants; record by record, so nothing is learnt from the data."""

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs[name]
        m = torch.tensor(mean, device=x.device).view(-1, 1, 1)
        s = torch.tensor(std, device=x.device).view(-1, 1, 1)
        return {name: (x.float() / white - m) / s}

    return prepare

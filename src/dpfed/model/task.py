"""How records enter a model and what their loss is; and the public facts about inputs that a model is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class InputSpec:
    """Public facts about the inputs: kind, shape of one record, number of classes, value of full intensity."""

    kind: Literal["image", "features", "text"]
    name: str
    shape: tuple[int, ...]
    classes: int
    white: float = 255.0

    def synthetic(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Records of the right form that nobody owns, for checks before any private record is read."""
        if self.kind == "image":
            pixels = torch.randint(0, int(self.white) + 1, (count, *self.shape), generator=generator)
            return {self.name: pixels.to(torch.uint8)}
        return {self.name: torch.randn(count, *self.shape, generator=generator)}


def per_record_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record, never averaged over records."""
    return F.cross_entropy(scores.float(), labels, reduction="none")

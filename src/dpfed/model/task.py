"""How records enter a model and what their loss is; and the public facts about inputs that a model is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class InputSpec:
    """Public facts about the inputs.

    kind, name, shape  what one record is, and the name under which it enters the model
    classes            number of classes
    white              for images: the value of full intensity
    vocabulary         for text: how many tokens there are
    """

    kind: Literal["image", "features", "text"]
    name: str
    shape: tuple[int, ...]
    classes: int
    white: float = 255.0
    vocabulary: int = 0

    def synthetic(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Records of the right form that nobody owns, for checks before any private record is read."""
        if self.kind == "image":
            pixels = torch.randint(
                0, int(self.white) + 1, (count, *self.shape), generator=generator
            )
            return {self.name: pixels.to(torch.uint8)}
        if self.kind == "text":
            return self._tokens(count, generator)
        return {self.name: torch.randn(count, *self.shape, generator=generator)}

    def _tokens(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Records of different length, so that padding is a part of what is checked."""
        (length,) = self.shape
        ids = torch.randint(0, max(self.vocabulary, 1), (count, length), generator=generator)
        lengths = torch.tensor([max(1, length - length * j // (count + 1)) for j in range(count)])
        mask = torch.arange(length) < lengths.unsqueeze(1)
        return {self.name: ids.to(torch.int32), "attention_mask": mask.to(torch.uint8)}


Score = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
Judge = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """What a model's output is good for.

    score    (logits, raw inputs) -> one row of scores for each record
    loss     (scores, labels) -> one loss for each record
    correct  (scores, labels) -> share of each record that is answered rightly, 0..1
    """

    score: Score
    loss: Judge
    correct: Judge


def per_record_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record, never averaged over records."""
    return F.cross_entropy(scores.float(), labels, reduction="none")


def right_class(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(1) == labels).float()


def next_token_scores(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """`[M, L, V]` -> `[M, 2]`: mean loss and accuracy over the record's own next tokens; padding counts for nothing."""
    ids = inputs["input_ids"][:, 1:].long()
    real = inputs["attention_mask"][:, 1:].to(torch.float32)
    ahead = logits[:, :-1].float()
    losses = F.cross_entropy(ahead.transpose(1, 2), ids, reduction="none")
    right = (ahead.detach().argmax(-1) == ids).float()
    count = real.sum(1).clamp_min(
        1
    )  # a text of one token has nothing to predict: loss zero, gradient zero
    return torch.stack([(losses * real).sum(1) / count, (right * real).sum(1) / count], 1)


CLASSIFY = Task(lambda logits, inputs: logits, per_record_loss, right_class)
NEXT_TOKEN = Task(
    next_token_scores, lambda scores, labels: scores[:, 0], lambda scores, labels: scores[:, 1]
)

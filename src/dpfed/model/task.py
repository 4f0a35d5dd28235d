"""The public facts about inputs that a model is built from, and the tasks with their losses."""

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

    kind, name, shape  of one record; the model's argument has this name
    classes            number of classes
    white              for images: the value of full intensity
    vocabulary         for text: number of tokens
    """

    kind: Literal["image", "features", "text"]
    name: str
    shape: tuple[int, ...]
    classes: int
    white: float = 255.0
    vocabulary: int = 0

    def synthetic(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return random records of this form, for checks before any private record is read."""
        if self.kind == "image":
            pixels = torch.randint(
                0, int(self.white) + 1, (count, *self.shape), generator=generator
            )
            return {self.name: pixels.to(torch.uint8)}
        if self.kind == "text":
            return self._tokens(count, generator)
        return {self.name: torch.randn(count, *self.shape, generator=generator)}

    def _tokens(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return records of different length, so that checks cover padding."""
        (length,) = self.shape
        ids = torch.randint(0, max(self.vocabulary, 1), (count, length), generator=generator)
        lengths = torch.tensor([max(1, length - length * j // (count + 1)) for j in range(count)])
        mask = torch.arange(length) < lengths.unsqueeze(1)
        return {self.name: ids.to(torch.int32), "attention_mask": mask.to(torch.uint8)}


Score = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
Judge = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """The use of a model's output.

    score    (logits, raw inputs) -> one row of scores for each record
    loss     (scores, labels) -> one loss for each record
    correct  (scores, labels) -> share of correct answers in each record, 0..1
    """

    score: Score
    loss: Judge
    correct: Judge


def per_record_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each record, never averaged over records."""
    return F.cross_entropy(scores.float(), labels, reduction="none")


def right_class(scores: Tensor, labels: Tensor) -> Tensor:
    """Return 1 for each record whose highest score is that of its label, else 0."""
    return (scores.argmax(1) == labels).float()


def next_token_scores(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return each record's mean loss and accuracy over its next tokens without padding, `[M, 2]`.

    logits `[M, L, V]`.
    """
    ids = inputs["input_ids"][:, 1:].long()
    real = inputs["attention_mask"][:, 1:].to(torch.float32)
    ahead = logits[:, :-1].float()
    losses = F.cross_entropy(ahead.transpose(1, 2), ids, reduction="none")
    right = (ahead.detach().argmax(-1) == ids).float()
    # A text of one token has nothing to predict: its loss and gradient are zero.
    count = real.sum(1).clamp_min(1)
    return torch.stack([(losses * real).sum(1) / count, (right * real).sum(1) / count], 1)


CLASSIFY = Task(lambda logits, inputs: logits, per_record_loss, right_class)
NEXT_TOKEN = Task(
    next_token_scores, lambda scores, labels: scores[:, 0], lambda scores, labels: scores[:, 1]
)

"""Public facts about a model's inputs, and tasks with their losses and accuracies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.errors import DpfedError


@dataclass(frozen=True)
class InputSpec:
    """Public facts about the inputs, from which a model is built.

    kind        kind of a record: an image, a vector of features, or a text
    name        name of the model's argument that takes the records
    shape       shape of one record
    classes     number of classes
    white       for images: the pixel value that means full intensity
    vocabulary  for texts: number of tokens that the model knows
    """

    kind: Literal["image", "features", "text"]
    name: str
    shape: tuple[int, ...]
    classes: int
    white: float = 255.0
    vocabulary: int = 0

    def synthetic(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return `count` random records by input name, so that checks read no private data."""
        if self.kind == "image":
            pixels = torch.randint(
                0, int(self.white) + 1, (count, *self.shape), generator=generator
            )
            return {self.name: pixels.to(torch.uint8)}
        if self.kind == "text":
            return self._tokens(count, generator)
        return {self.name: torch.randn(count, *self.shape, generator=generator)}

    def _tokens(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return random texts of different lengths, so that checks cover padding."""
        (length,) = self.shape
        ids = torch.randint(0, max(self.vocabulary, 1), (count, length), generator=generator)
        lengths = torch.tensor([max(1, length - length * j // (count + 1)) for j in range(count)])
        mask = torch.arange(length) < lengths.unsqueeze(1)
        return {self.name: ids.to(torch.int32), "attention_mask": mask.to(torch.uint8)}


Judge = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """The functions that turn a model's scores into a loss and an accuracy.

    loss     (scores, labels) -> one loss for each record
    correct  (scores, labels) -> share of correct answers in each record, 0..1
    causal   True: scores come from `causal_loss.causal_scores`; False: scores are the logits
    """

    loss: Judge
    correct: Judge
    causal: bool = False


def per_record_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each record, `[M]`, without a mean over records."""
    return F.cross_entropy(scores.float(), labels, reduction="none")


def right_class(scores: Tensor, labels: Tensor) -> Tensor:
    """Return for each record 1.0 if its label has the highest score, else 0.0."""
    return (scores.argmax(1) == labels).float()


CLASSIFY = Task(per_record_loss, right_class)
# The scores of a causal language model are each record's loss, accuracy and number of targets.
TARGETS = 2
NEXT_TOKEN = Task(
    lambda scores, labels: scores[:, 0], lambda scores, labels: scores[:, 1], causal=True
)


def weighted(task: Task, weights: Sequence[float], classes: int) -> Task:
    """Return the task with each record's loss multiplied by the weight of its class.

    The weights are public constants. The clip norm bounds a weighted gradient like any other.
    """
    if not weights:
        return task
    if task.correct is not right_class:
        raise DpfedError("model.class_weights is for classes: leave it out for this model")
    if len(weights) != classes:
        raise DpfedError(
            f"model.class_weights has {len(weights)} numbers, and the data have {classes} classes"
        )
    # One copy on each device, made before any CUDA graph is captured.
    tables: dict[torch.device, Tensor] = {}

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        device = labels.device
        if device not in tables:
            tables[device] = torch.tensor(weights, device=device)
        return task.loss(scores, labels) * tables[device][labels]

    return replace(task, loss=loss)

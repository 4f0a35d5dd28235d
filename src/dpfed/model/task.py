"""Describe a model's inputs, and define tasks with their losses, accuracies and predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.config import LabelTask
from dpfed.errors import DpfedError


@dataclass(frozen=True)
class InputSpec:
    """Kind and shape of a model's inputs and labels; none of these values is private.

    kind        kind of a record: an image, a vector of features, or a text
    name        name of the model's argument that takes the records
    shape       shape of one record
    classes     number of classes; for "regress" 1, the number of outputs
    white       for images: the pixel value that means full intensity
    vocabulary  for texts: number of tokens that the model knows
    task        what a label is: a class, a number, or for each class 0 or 1
    center      for "regress": a public constant; the model learns (number - center) / scale
    """

    kind: Literal["image", "features", "text"]
    name: str
    shape: tuple[int, ...]
    classes: int
    white: float = 255.0
    vocabulary: int = 0
    task: LabelTask = "classify"
    center: float = 0.0
    scale: float = 1.0

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


# A function (scores, labels) -> one number for each record.
PerRecord = Callable[[Tensor, Tensor], Tensor]


def class_examples(count: int, classes: int) -> Tensor:
    return torch.arange(count) % max(classes, 1)


@dataclass(frozen=True)
class Task:
    """The functions that turn a model's scores into a loss, an accuracy and predictions.

    loss      (scores, labels) -> one loss for each record
    correct   (scores, labels) -> share of correct answers in each record, 0..1; None for
              regression, where answers are not just right or wrong
    name      name of the task; the scores of "causal" come from `causal_loss.causal_scores`,
              all others are the logits `[M, classes]`
    predict   scores -> probabilities `[M, classes]`; for "regress" numbers `[M]`
    examples  (count, classes) -> made-up labels for checks on synthetic records
    """

    loss: PerRecord
    correct: PerRecord | None = None
    name: Literal["classify", "causal", "regress", "multilabel"] = "classify"
    predict: Callable[[Tensor], Tensor] = lambda scores: scores.double().softmax(1)
    examples: Callable[[int, int], Tensor] = class_examples

    @property
    def causal(self) -> bool:
        return self.name == "causal"


def per_record_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each record, `[M]`, without a mean over records."""
    return F.cross_entropy(scores.float(), labels, reduction="none")


def right_class(scores: Tensor, labels: Tensor) -> Tensor:
    """Return for each record 1.0 if its label has the highest score, else 0.0."""
    return (scores.argmax(1) == labels).float()


def label_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the sigmoid cross-entropy of each record and each label, `[M, classes]`."""
    return F.binary_cross_entropy_with_logits(scores.float(), labels.float(), reduction="none")


def right_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """Return for each record the share of labels that are predicted right at the threshold 1/2."""
    return ((scores > 0) == labels.bool()).float().mean(1)


def label_examples(count: int, classes: int) -> Tensor:
    return (torch.arange(count).unsqueeze(1) + torch.arange(classes)) % 2


CLASSIFY = Task(per_record_loss, right_class)
MULTILABEL = Task(
    lambda scores, labels: label_losses(scores, labels).mean(1),
    right_labels,
    "multilabel",
    lambda scores: scores.double().sigmoid(),
    label_examples,
)
# A causal language model has three scores for each record: loss, accuracy, and number of targets
# (tokens that the loss covers). This is the index of the number of targets.
TARGETS = 2
NEXT_TOKEN = Task(
    lambda scores, labels: scores[:, 0], lambda scores, labels: scores[:, 1], "causal"
)


def regression(center: float, scale: float) -> Task:
    """Return the task of predicting (number - center) / scale with the squared error as loss."""

    def output(scores: Tensor) -> Tensor:
        # A torch module may give one number for each record, `[M]`, or a column, `[M, 1]`.
        return scores.reshape(len(scores), -1)[:, 0]

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        # Subtract the center from the float64 labels: float32 would lose digits of a large center.
        return (output(scores).float() - ((labels - center) / scale).float()).square()

    def predict(scores: Tensor) -> Tensor:
        return output(scores).double() * scale + center

    def examples(count: int, classes: int) -> Tensor:
        return center + scale * torch.arange(1, count + 1, dtype=torch.float64)

    return Task(loss, None, "regress", predict, examples)


def task_of(spec: InputSpec) -> Task:
    """Return the task of data with labels, which `spec.task` names."""
    if spec.task == "regress":
        return regression(spec.center, spec.scale)
    return MULTILABEL if spec.task == "multilabel" else CLASSIFY


def weighted(task: Task, weights: Sequence[float], classes: int) -> Task:
    """Return the task with the loss of each class multiplied by the weight of the class.

    The weights are public constants. The clip norm bounds a weighted gradient like any other.
    """
    if not weights:
        return task
    if task.name not in ("classify", "multilabel"):
        raise DpfedError("model.class_weights is for classes: leave it out for this model")
    if len(weights) != classes:
        raise DpfedError(
            f"model.class_weights has {len(weights)} numbers, and the data have {classes} classes"
        )
    # Keep a copy of the weights on each device: a captured CUDA graph cannot copy them there.
    tables: dict[torch.device, Tensor] = {}

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        device = labels.device
        if device not in tables:
            tables[device] = torch.tensor(weights, device=device)
        if task.name == "multilabel":
            return (label_losses(scores, labels) * tables[device]).mean(1)
        return task.loss(scores, labels) * tables[device][labels]

    return replace(task, loss=loss)

"""Evaluate a trained vector on the server's public test set.

Loss and accuracy of a classifier are means over records. Those of a language model are means over
target tokens, so that exp(loss) is the perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dpfed.model.task import TARGETS
from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import Job

MAX_BATCH = 8192
# exp(700) is finite in float64, exp(710) is not.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Scores:
    """Scores of one class on the test set; `support` is the number of test records of the class."""

    precision: float
    recall: float
    f1: float
    support: int


def scored_batches(job: Job, theta: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's outputs and the true labels of the test records, one batch at a time."""
    records = len(job.test.labels)
    batch = min(MAX_BATCH, job.model.records_at_once(job.device))
    for first in range(0, records, batch):
        job.on_activity(Activity("test records", first, records))
        rows = torch.arange(first, min(first + batch, records), device=job.device)
        inputs, labels = job.test.take(rows)
        yield job.model.scores(theta, inputs), labels


def evaluate(job: Job, theta: Tensor) -> tuple[float | None, float | None]:
    """Return accuracy and mean loss on the server's test set; (None, None) without a test set."""
    # One tensor holds all sums, so that the host waits only once for a copy from the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=job.device)
    for scores, labels in scored_batches(job, theta):
        weights = _weights(job, scores)
        correct = (job.model.correct(scores, labels).double() * weights).sum()
        loss = (job.model.loss(scores, labels).double() * weights).sum()
        sums += torch.stack([correct, loss, weights.sum()])
    right, total, weight = sums.tolist()
    return (right / weight, total / weight) if weight else (None, None)


def _weights(job: Job, scores: Tensor) -> Tensor:
    """Return the weight of each record: 1, or the number of its target tokens."""
    if job.model.classifies:
        return scores.new_ones(len(scores), dtype=torch.float64)
    return scores[:, TARGETS].double()


def perplexity(loss: float | None) -> float | None:
    """Return exp(loss), finite for any finite loss; None if there is no loss."""
    if loss is None or not math.isfinite(loss):
        return None
    return math.exp(min(loss, LARGEST_EXPONENT))


def confusion(job: Job, theta: Tensor) -> Tensor:
    """Return the confusion table `[classes, classes]` of the test records.

    Row i, column j contains the number of records of class i that the model assigns to class j.
    """
    count = len(job.classes)
    table = torch.zeros(count * count, dtype=torch.int64)
    for scores, labels in scored_batches(job, theta):
        table += torch.bincount((labels * count + scores.argmax(1)).cpu(), minlength=count * count)
    return table.view(count, count)


def class_scores(table: Tensor) -> list[Scores]:
    """Return precision, recall, F1 and support of each class, computed from a confusion table.

    A class that the model never predicts has precision 0. A class without records has recall 0.
    """
    correct = table.diag().double()
    predicted = table.sum(0).double()
    support = table.sum(1).double()
    precision = correct / predicted.clamp_min(1)
    recall = correct / support.clamp_min(1)
    f1 = 2 * correct / (predicted + support).clamp_min(1)
    return [
        Scores(float(p), float(r), float(f), int(n))
        for p, r, f, n in zip(precision, recall, f1, support, strict=True)
    ]


def task_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Return accuracy, macro F1 and the scores of each class on the test set, as one dict.

    The dict is empty if there is no test set. That of a language model has `language_metrics`.

    f1          only with two classes: F1 of the second class, as in the GLUE benchmark
    one_answer  only if the model predicts one class for all records: the name of this class
    """
    if len(job.test.labels) == 0:
        return {}
    if not job.model.classifies:
        return language_metrics(job, theta)
    table = confusion(job, theta)
    scores = class_scores(table)
    found: dict[str, Any] = {
        "accuracy": int(table.diag().sum()) / int(table.sum()),
        "macro_f1": sum(s.f1 for s in scores) / len(scores),
        "per_class": {name: asdict(score) for name, score in zip(job.classes, scores, strict=True)},
    }
    if len(scores) == 2:
        found["f1"] = scores[1].f1
    predicted = table.sum(0).nonzero().flatten().tolist()
    if len(predicted) == 1 and sum(s.support > 0 for s in scores) > 1:
        found["one_answer"] = job.classes[predicted[0]]
    return found


def language_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Return the scores of a language model on the test records that have targets, as one dict.

    perplexity      exp of the mean loss of a target token
    token_accuracy  share of target tokens that have the highest score
    record_loss     mean over records of their mean loss, which training minimises
    exact_match     only for completions and chats: share of records of which greedy generation
                    gives all targets. With the true tokens before it, every target then has the
                    highest score, and with several answers in a chat each follows the true ones.
    """
    parts = [scores[scores[:, TARGETS] > 0] for scores, _ in scored_batches(job, theta)]
    scores = torch.cat(parts).double()
    if not len(scores):
        return {}
    share = scores[:, TARGETS] / scores[:, TARGETS].sum()
    found = {
        "perplexity": perplexity(float(scores[:, 0] @ share)),
        "token_accuracy": float(scores[:, 1] @ share),
        "record_loss": float(scores[:, 0].mean()),
    }
    if "target_mask" in job.test.inputs:
        found["exact_match"] = float((scores[:, 1] == 1).double().mean())
    return found

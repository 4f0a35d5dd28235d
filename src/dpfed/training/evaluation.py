"""How good a trained vector is on the server's public test set: accuracy, F1, and each class by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import Job

MAX_BATCH = 8192


@dataclass(frozen=True)
class Scores:
    """Precision, recall and F1 of one class; support is the number of its records."""

    precision: float
    recall: float
    f1: float
    support: int


def scored_batches(job: Job, theta: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's scores and the labels of the test records, batch by batch."""
    records = len(job.test.labels)
    batch = min(MAX_BATCH, job.model.records_at_once(job.device))
    for first in range(0, records, batch):
        job.on_activity(Activity("test records", first, records))
        rows = torch.arange(first, min(first + batch, records), device=job.device)
        inputs, labels = job.test.take(rows)
        yield job.model.scores(theta, inputs), labels


def confusion(job: Job, theta: Tensor) -> Tensor:
    """How often the class of a row was answered with the class of a column, `[classes, classes]`."""
    count = len(job.classes)
    table = torch.zeros(count * count, dtype=torch.int64)
    for scores, labels in scored_batches(job, theta):
        table += torch.bincount((labels * count + scores.argmax(1)).cpu(), minlength=count * count)
    return table.view(count, count)


def class_scores(table: Tensor) -> list[Scores]:
    """From a confusion table; a class that was never answered has precision 0, one without records recall 0."""
    right, answered, there = table.diag().double(), table.sum(0).double(), table.sum(1).double()
    precision, recall = right / answered.clamp_min(1), right / there.clamp_min(1)
    f1 = 2 * right / (answered + there).clamp_min(1)
    return [
        Scores(float(p), float(r), float(f), int(n))
        for p, r, f, n in zip(precision, recall, f1, there, strict=True)
    ]


def task_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Accuracy, macro F1 and every class; with two classes also F1 of the second, as GLUE reports it; and the class that all
    records were taken for, where it is one."""
    if not job.model.classifies or len(job.test.labels) == 0:
        return {}
    table = confusion(job, theta)
    scores = class_scores(table)
    found: dict[str, Any] = {
        "accuracy": int(table.diag().sum()) / int(table.sum()),
        "macro_f1": sum(s.f1 for s in scores) / len(scores),
        "per_class": {
            name: {"precision": s.precision, "recall": s.recall, "f1": s.f1, "support": s.support}
            for name, s in zip(job.classes, scores, strict=True)
        },
    }
    answered, there = table.sum(0).nonzero().flatten().tolist(), sum(s.support > 0 for s in scores)
    one = {"one_answer": job.classes[answered[0]]} if len(answered) == 1 < there else {}
    return found | ({"f1": scores[1].f1} if len(scores) == 2 else {}) | one

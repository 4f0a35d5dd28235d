"""Evaluate a trained vector (all trainable parameters) on the server's public test set.

Loss and accuracy are means over records. Those of a language model are means over target tokens, so
that exp(loss) is the perplexity. Regression has no accuracy. It has R2, which follows from the
loss.
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
# Largest exponent of a perplexity: exp(700) is finite in float64, and exp(710) is not.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Scores:
    """Precision, recall and F1 of one class on the test set.

    support  number of test records of the class
    """

    precision: float
    recall: float
    f1: float
    support: int


def scored_batches(job: Job, theta: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's outputs and the true labels of the test records, one batch at a time."""
    records = len(job.public.test.labels)
    batch = min(MAX_BATCH, job.model.records_at_once(job.device))
    for first in range(0, records, batch):
        job.on_activity(Activity("test records", first, records))
        rows = torch.arange(first, min(first + batch, records), device=job.device)
        inputs, labels = job.public.test.take(rows)
        yield job.model.scores(theta, inputs), labels


def evaluate(job: Job, theta: Tensor) -> tuple[float | None, float | None]:
    """Evaluate the vector `theta`: return (accuracy, mean loss) on the server's test set.

    Without a test set return (None, None). The accuracy of regression is None.
    """
    task = job.model.task
    # Collect all sums in one tensor on the GPU. Each copy to the CPU would make the CPU wait.
    sums = torch.zeros(3, dtype=torch.float64, device=job.device)
    for scores, labels in scored_batches(job, theta):
        weights = _weights(job, scores)
        right = task.correct(scores, labels).double() if task.correct else 0 * weights
        loss = task.loss(scores, labels).double()
        sums += torch.stack([(right * weights).sum(), (loss * weights).sum(), weights.sum()])
    correct, total, weight = sums.tolist()
    if not weight:
        return None, None
    return (correct / weight if task.correct else None), total / weight


def r_squared(job: Job, loss: float | None) -> float | None:
    """Return R2 of a regression: the share of the test labels' variance that the model explains.

    Return None for other tasks, without a finite loss, and if all test labels are equal.

    loss  mean squared error of the standardised test labels
    """
    if job.model.task.name != "regress" or loss is None or not math.isfinite(loss):
        return None
    variance = float(job.public.test.labels.var(correction=0)) / job.public.spec.scale**2
    return 1 - loss / variance if variance else None


def _weights(job: Job, scores: Tensor) -> Tensor:
    """Return the weight of each test record in the mean loss: 1, or its number of target tokens."""
    if job.model.task.causal:
        return scores[:, TARGETS].double()
    return scores.new_ones(len(scores), dtype=torch.float64)


def perplexity(loss: float | None) -> float | None:
    """Return the perplexity exp(loss) as a finite number; None without a finite loss."""
    if loss is None or not math.isfinite(loss):
        return None
    return math.exp(min(loss, LARGEST_EXPONENT))


def confusion(job: Job, theta: Tensor) -> Tensor:
    """Return the confusion table `[classes, classes]` of the test records.

    Row i, column j contains the number of records of class i that the model assigns to class j.
    """
    count = len(job.public.classes)
    table = torch.zeros(count * count, dtype=torch.int64)
    for scores, labels in scored_batches(job, theta):
        table += torch.bincount((labels * count + scores.argmax(1)).cpu(), minlength=count * count)
    return table.view(count, count)


def class_scores(table: Tensor) -> list[Scores]:
    """Return precision, recall, F1 and support of each class, computed from a confusion table.

    A class that the model never predicts has precision 0. A class without records has recall 0.
    """
    return _class_scores(table.diag(), table.sum(0), table.sum(1))


def label_scores(job: Job, theta: Tensor) -> list[Scores]:
    """Return the scores of each label of multi-label data.

    The `support` of a label is the number of test records with this label.
    """
    counts = torch.zeros(3, len(job.public.classes), dtype=torch.int64)
    for scores, labels in scored_batches(job, theta):
        found, true = (scores > 0).cpu(), labels.bool().cpu()
        counts += torch.stack([(found & true).sum(0), found.sum(0), true.sum(0)])
    return _class_scores(*counts)


def _class_scores(correct: Tensor, predicted: Tensor, support: Tensor) -> list[Scores]:
    """Return precision, recall and F1 of each class, from counts of records, `[classes]` each.

    correct    records of the class that the model assigns to the class
    predicted  records that the model assigns to the class
    support    records of the class
    """
    precision = correct.double() / predicted.clamp_min(1)
    recall = correct.double() / support.clamp_min(1)
    f1 = 2 * correct.double() / (predicted + support).clamp_min(1)
    return [
        Scores(float(p), float(r), float(f), int(n))
        for p, r, f, n in zip(precision, recall, f1, support, strict=True)
    ]


def task_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Return the metrics of the model's task on the test set, as one dict.

    The dict is empty if there is no test set. For single classes, it has accuracy, macro F1 and the
    scores of each class, and in some cases:

    f1          only with two classes: F1 of the second class, as in the GLUE benchmark
    one_answer  only if the model predicts one class for all records: the name of this class

    Regression, multi-label data and language models have other metrics.
    """
    if len(job.public.test.labels) == 0:
        return {}
    others = {"causal": language_metrics, "regress": number_metrics, "multilabel": label_metrics}
    if job.model.task.name in others:
        return others[job.model.task.name](job, theta)
    table = confusion(job, theta)
    scores = class_scores(table)
    found: dict[str, Any] = {
        "accuracy": int(table.diag().sum()) / int(table.sum()),
        "macro_f1": sum(s.f1 for s in scores) / len(scores),
        "per_class": {
            name: asdict(score) for name, score in zip(job.public.classes, scores, strict=True)
        },
    }
    if len(scores) == 2:
        found["f1"] = scores[1].f1
    predicted = table.sum(0).nonzero().flatten().tolist()
    if len(predicted) == 1 and sum(s.support > 0 for s in scores) > 1:
        found["one_answer"] = job.public.classes[predicted[0]]
    return found


def number_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Return the metrics of regression: mae and rmse in the unit of the test labels, and r2."""
    predict = job.model.task.predict
    errors = torch.cat(
        [predict(scores) - labels.double() for scores, labels in scored_batches(job, theta)]
    )
    squared = float(errors.square().mean())
    found = {"mae": float(errors.abs().mean()), "rmse": math.sqrt(squared)}
    r2 = r_squared(job, squared / job.public.spec.scale**2)
    return found if r2 is None else {**found, "r2": r2}


def label_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Return the metrics of multi-label data. A label is predicted if its probability is above 1/2.

    accuracy     share of right answers, over all records and labels
    exact_match  share of records with all labels right
    """
    task = job.model.task
    assert task.correct is not None
    right = torch.cat([task.correct(*batch).double() for batch in scored_batches(job, theta)])
    scores = label_scores(job, theta)
    return {
        "accuracy": float(right.mean()),
        "exact_match": float((right == 1).double().mean()),
        "macro_f1": sum(s.f1 for s in scores) / len(scores),
        "per_class": {
            name: asdict(score) for name, score in zip(job.public.classes, scores, strict=True)
        },
    }


def language_metrics(job: Job, theta: Tensor) -> dict[str, Any]:
    """Return the metrics of a language model on the test records that have targets, as one dict.

    perplexity      exp of the mean loss of a target token
    token_accuracy  share of target tokens that the model finds most probable
    record_loss     mean over records of each record's mean loss, which training minimises
    exact_match     only for completions and chats: share of records in which the model finds every
                    target most probable, given the true tokens before it. Greedy generation after
                    the prompt and the true earlier answers then writes exactly these targets
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
    if "target_mask" in job.public.test.inputs:
        found["exact_match"] = float((scores[:, 1] == 1).double().mean())
    return found

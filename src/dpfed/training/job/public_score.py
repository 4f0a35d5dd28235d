"""Compute the score on the server's public test set that ends a run early or chooses a round.

The choice depends only on public data and on models that are already released, so it costs no
privacy. The planned epsilon is right for every possible last round. If the run ends early, the
ledger is not charged for the rounds left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.errors import DpfedError, phrase, reason
from dpfed.training.evaluation import (
    class_scores,
    confusion,
    evaluate,
    label_scores,
    perplexity,
    r_squared,
    scored_batches,
)
from dpfed.training.job.job import Job
from dpfed.training.rounds import Round

Metric = Callable[[np.ndarray, np.ndarray], float]
"""Takes labels and predictions of the test set; a larger value is better.

Predictions are probabilities `[records, classes]`. For regression they are numbers `[records]`.
"""
# Values of run.metric that fit each task. "given" stands for a function that the user provides.
METRICS = {
    "classify": ("accuracy", "loss", "macro_f1", "auroc", "given"),
    "multilabel": ("accuracy", "loss", "macro_f1", "auroc", "given"),
    "regress": ("r2", "mae", "loss", "given"),
    "causal": ("accuracy", "loss", "perplexity"),
}
# Metrics that follow from the accuracy and the loss, which `evaluate` computes for every run.
EVALUATED = ("accuracy", "loss", "perplexity", "r2")
# Metrics of which a smaller value is better.
ERRORS = ("loss", "perplexity", "mae")
_given: ContextVar[Metric | None] = ContextVar("metric", default=None)


@contextmanager
def given_metric(metric: Metric | None) -> Iterator[None]:
    """Use the function `metric` for runs with `run.metric = "given"` inside the `with` block."""
    token = _given.set(metric)
    try:
        yield
    finally:
        _given.reset(token)


def refuse_metric(job: Job) -> None:
    """Raise DpfedError if `run.metric` cannot be computed for this run's task or test set."""
    run = job.config.run
    chooses = run.keep == "best" or run.early_stopping is not None
    if chooses and len(job.public.test.labels) == 0:
        raise DpfedError(
            "run.keep and run.early_stopping choose by a score on the server's test set, "
            "and there is none"
        )
    metric, task = metric_of(job), job.model.task.name
    if metric not in METRICS[task]:
        shown = phrase("given metric") if metric == "given" else repr(metric)
        raise DpfedError(f"run.metric = {shown} does not fit this task: give {_choices(task)}")
    if metric in EVALUATED or len(job.public.test.labels) == 0:
        return
    if metric == "given" and _given.get() is None:
        raise DpfedError(
            "this run's metric was handed over by a program: call dpfed.fine_tune there"
        )
    if metric == "auroc":
        _refuse_absent(job)


def _choices(task: str) -> str:
    """Return the metrics that fit a task in words, such as "accuracy, loss or macro_f1"."""
    words = [phrase("given metric") if name == "given" else name for name in METRICS[task]]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _refuse_absent(job: Job) -> None:
    """Raise DpfedError if AUROC is undefined: no test record has some class, or all have it."""
    members = _members(job.public.test.labels.cpu().numpy(), len(job.public.classes)).mean(0)
    absent = np.flatnonzero((members == 0) | (members == 1))
    if len(absent):
        names = ", ".join(repr(job.public.classes[i]) for i in absent[:3])
        raise DpfedError(
            f'run.metric = "auroc" needs test records with and without each class; see {names}'
        )


def metric_of(job: Job) -> str:
    """Return the metric of a run; "auto" is R2 for regression, else accuracy."""
    metric = job.config.run.metric
    if metric != "auto":
        return metric
    return "r2" if job.model.task.name == "regress" else "accuracy"


def with_scores(job: Job, round: Round, theta: Tensor) -> Round:
    """Return the round with the scores that the vector `theta` `[P]` has on the test set."""
    accuracy, loss = evaluate(job, theta)
    score = _other_score(job, theta)
    return replace(round, accuracy=accuracy, loss=loss, r2=r_squared(job, loss), score=score)


def _other_score(job: Job, theta: Tensor) -> float | None:
    """Return the value of `run.metric` for `theta` if `evaluate` does not compute it already.

    Return None for a metric in EVALUATED, without a test set, or if a prediction is not finite.
    """
    metric = metric_of(job)
    if metric in EVALUATED or len(job.public.test.labels) == 0:
        return None
    if metric == "macro_f1":
        several = job.model.task.name == "multilabel"
        scores = label_scores(job, theta) if several else class_scores(confusion(job, theta))
        return sum(s.f1 for s in scores) / len(scores)
    labels, found = predictions(job, theta)
    if not np.isfinite(found).all():
        return None
    function = {"given": _given.get(), "auroc": auroc, "mae": mean_error}[metric]
    assert function is not None
    try:
        value = float(function(labels, found))
    except Exception as error:
        # The user's function can raise errors of any class, so catch all of them.
        raise DpfedError(f"metric failed on the test set: {reason(error)}") from error
    if not math.isfinite(value):
        raise DpfedError(f"metric failed on the test set: it must be a finite number, not {value}")
    return value


def predictions(job: Job, theta: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and predictions of the test set, in the form that a `Metric` takes."""
    predict = job.model.task.predict
    found = [(y.cpu(), predict(scores).cpu()) for scores, y in scored_batches(job, theta)]
    labels, predicted = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return labels, predicted


def mean_error(numbers: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean absolute error."""
    return float(np.abs(numbers - predicted).mean())


def auroc(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the area under the ROC curve: the mean over classes of one class against the rest.

    labels  class numbers `[records]`, or 0 and 1 for each class `[records, classes]`
    """
    from sklearn.metrics import roc_auc_score

    classes = probabilities.shape[1]
    members = _members(labels, classes)
    return float(
        np.mean([roc_auc_score(members[:, c], probabilities[:, c]) for c in range(classes)])
    )


def _members(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return 1 for each record and class if the record has the class, else 0: a matrix."""
    members: np.ndarray = labels if labels.ndim == 2 else np.eye(classes, dtype=np.uint8)[labels]
    return members


def chosen_score(job: Job, round: Round) -> float | None:
    """Return the score that compares rounds, or None if there is none; larger is better.

    It is the value of `run.metric`, with a minus sign if smaller values of the metric are better.
    """
    metric = metric_of(job)
    value = _value(metric, round)
    return -value if value is not None and metric in ERRORS else value


def _value(metric: str, round: Round) -> float | None:
    """Return the value of a metric in an evaluated round."""
    known = {
        "accuracy": round.accuracy,
        "loss": round.loss,
        "perplexity": perplexity(round.loss),
        "r2": round.r2,
    }
    return known.get(metric, round.score)


def kept_round(job: Job, last: Round) -> Round:
    """Return the last round; if `run.keep` is "best", give it vector and scores of the best one."""
    if job.config.run.keep != "best" or last.best is None:
        return last
    theta = last.best.theta
    return with_scores(job, replace(last, theta=theta), theta)


def choice_of(job: Job, kept: Round) -> dict[str, Any]:
    """Return the entries of a run's result that say how the kept round was chosen.

    metric      name and value of the metric, if it is not accuracy
    kept_round  number of the best round, if `run.keep = "best"`
    """
    found: dict[str, Any] = {}
    metric = metric_of(job)
    if metric != "accuracy":
        found["metric"] = {"name": metric, "value": _value(metric, kept)}
    if kept.best is not None and job.config.run.keep == "best":
        found["kept_round"] = int(kept.best.round)
    return found


def choice_notes(job: Job, kept: Round) -> list[str]:
    """Return notes for the user: if the run ended early, and if the best round was kept."""
    run = job.config.run
    notes: list[str] = []
    if kept.best is None:
        return notes
    if run.early_stopping is not None and kept.t < run.rounds:
        ended = (
            f"ended after round {kept.t} of {run.rounds}, because {run.early_stopping} evaluations "
            f"had no better {_name(job)}"
        )
        planned = f"; the stated epsilon allows for all {run.rounds} rounds"
        notes.append(ended + planned * job.plan.private)
    if run.keep == "best":
        notes.append(
            f"the model is that of round {int(kept.best.round)}, which has the best {_name(job)} "
            "on the test set, so its score there is optimistic"
        )
    return notes


def _name(job: Job) -> str:
    metric = metric_of(job)
    return "metric" if metric == "given" else metric.replace("_", " ")

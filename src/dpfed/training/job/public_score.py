"""The score on the server's public data that ends a run early or chooses its best round.

Public data and released models alone decide, so the choice costs no privacy. The planned epsilon
holds for every possible end. A round that does not happen is not charged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.errors import DpfedError, reason
from dpfed.training.evaluation import class_scores, confusion, evaluate, scored_batches
from dpfed.training.job.job import Job
from dpfed.training.rounds import Round

Metric = Callable[[np.ndarray, np.ndarray], float]
"""Takes labels `[records]` and probabilities `[records, classes]`; a larger value is better."""
_given: ContextVar[Metric | None] = ContextVar("metric", default=None)


@contextmanager
def given_metric(metric: Metric | None) -> Iterator[None]:
    """Within this context, let `run.metric = "given"` call this function."""
    token = _given.set(metric)
    try:
        yield
    finally:
        _given.reset(token)


def refuse_metric(job: Job) -> None:
    """Raise DpfedError if the test set or the model cannot give the score that a run needs."""
    run = job.config.run
    chooses = run.keep == "best" or run.early_stopping is not None
    if chooses and len(job.test.labels) == 0:
        raise DpfedError(
            "run.keep and run.early_stopping choose by a score on the server's test set, "
            "and there is none"
        )
    if run.metric in ("accuracy", "loss") or len(job.test.labels) == 0:
        return
    if not job.model.classifies:
        raise DpfedError(
            f"run.metric = {run.metric!r} is for classes: give accuracy or loss for this model"
        )
    if run.metric == "given" and _given.get() is None:
        raise DpfedError(
            "this run's metric was handed over by a program: call dpfed.fine_tune there"
        )
    absent = set(range(len(job.classes))) - set(job.test.labels.tolist())
    if run.metric == "auroc" and absent:
        names = ", ".join(repr(job.classes[i]) for i in sorted(absent)[:3])
        raise DpfedError(
            f'run.metric = "auroc" needs test records of every class, and {names} has none'
        )


def own_score(job: Job, theta: Tensor) -> float | None:
    """Return the value of `run.metric`; None if `evaluate` computes it, or without a test set."""
    metric = job.config.run.metric
    if metric in ("accuracy", "loss") or len(job.test.labels) == 0:
        return None
    if metric == "macro_f1":
        scores = class_scores(confusion(job, theta))
        return sum(s.f1 for s in scores) / len(scores)
    labels, probabilities = predictions(job, theta)
    if not np.isfinite(probabilities).all():
        return None
    function = _given.get() if metric == "given" else auroc
    assert function is not None
    try:
        return float(function(labels, probabilities))
    except Exception as error:
        # The function of another program can raise errors of any class.
        raise DpfedError(f"metric failed on the test set: {reason(error)}") from error


def predictions(job: Job, theta: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return labels `[records]` and probabilities `[records, classes]` of the test set."""
    found = [
        (labels.cpu(), scores.double().softmax(1).cpu())
        for scores, labels in scored_batches(job, theta)
    ]
    labels, probabilities = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return labels, probabilities


def auroc(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the area under the ROC curve: of class 1 of two, else the mean of one against rest."""
    from sklearn.metrics import roc_auc_score

    classes = probabilities.shape[1]
    if classes == 2:
        return float(roc_auc_score(labels, probabilities[:, 1]))
    areas = [roc_auc_score(labels == c, probabilities[:, c]) for c in range(classes)]
    return float(np.mean(areas))


def chosen_score(job: Job, round: Round) -> float | None:
    """Return the score of a round by which rounds are compared; larger is better."""
    metric = job.config.run.metric
    if metric == "loss":
        return None if round.loss is None else -round.loss
    return round.accuracy if metric == "accuracy" else round.score


def kept_round(job: Job, last: Round) -> Round:
    """Return the last round; with `run.keep = "best"`, with vector and scores of the best round."""
    if job.config.run.keep != "best" or last.best is None:
        return last
    theta = last.best.theta
    accuracy, loss = evaluate(job, theta)
    return replace(last, theta=theta, accuracy=accuracy, loss=loss, score=own_score(job, theta))


def choice_of(job: Job, kept: Round) -> dict[str, Any]:
    """Return the entries of a result that name the metric and the kept round, where it matters."""
    found: dict[str, Any] = {}
    if job.config.run.metric != "accuracy":
        value = kept.loss if job.config.run.metric == "loss" else kept.score
        found["metric"] = {"name": job.config.run.metric, "value": value}
    if kept.best is not None and job.config.run.keep == "best":
        found["kept_round"] = int(kept.best.round)
    return found


def choice_notes(job: Job, kept: Round) -> list[str]:
    """Return sentences about an early end, and about a kept round."""
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
    metric = job.config.run.metric
    return "metric" if metric == "given" else metric.replace("_", " ")

"""The one round loop: cohort -> charge -> train -> aggregate -> evaluate. Backends compute cohorts, nothing else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.engine.fleet import context
from dpfed.engine.setup import Job
from dpfed.engine.spending import Spending
from dpfed.errors import DivergedError
from dpfed.privacy.oracle import Records


class Backend(Protocol):
    """Computes a cohort: the fleet in this process, several processes, or clients on a network."""

    def run_cohort(self, t: int, server: Any, clients: Sequence[int]) -> tuple[Message, int]: ...


@dataclass(frozen=True)
class Round:
    """What is known after a round. Accuracy and loss are those of the server's public test set.

    cohort, eligible  how many clients took part, and among how many they were drawn: for the server's eyes only
    """

    t: int
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    cohort: int
    eligible: int
    seconds: float
    theta: Tensor = field(repr=False)


Observer = Callable[[Round], None]


def train(job: Job, backend: Backend, spending: Spending, observe: Observer) -> Tensor:
    """Runs all rounds and returns the trained vector. `observe` is told of round 0, before training, and of each round."""
    started = time.perf_counter()
    everyone = context(job, 1, range(job.schedule.clients))
    server = job.algorithm.init(everyone, job.theta)
    observe(Round(0, *evaluate(job, server.theta), 0.0 if job.plan.private else None, 0, 0, 0.0, server.theta))
    for t in range(1, job.config.run.rounds + 1):
        able = spending.enough(t)
        cohort = choose(job, t, able)
        spending.charge(t, cohort)  # before anything of this round is released
        mean, answered = backend.run_cohort(t, server, cohort)
        server = job.algorithm.aggregate(dataclasses.replace(context(job, t, cohort), answered=answered), server, mean)
        if not job.config.run.allow_nan:
            _refuse_nonfinite(server, t)
        scored = t % job.config.run.eval_every == 0 or t == job.config.run.rounds
        accuracy, loss = evaluate(job, server.theta) if scored else (None, None)
        spent = spending.server_max() if scored else None
        observe(Round(t, accuracy, loss, spent, len(cohort), len(able), time.perf_counter() - started, server.theta))
    theta: Tensor = server.theta
    return theta


def choose(job: Job, t: int, able: np.ndarray) -> list[int]:
    """S distinct clients, uniformly among those that may take part, from the cohort's own stream."""
    rng = job.streams.generator("cohort", t)
    chosen = rng.choice(able, size=min(job.schedule.cohort, len(able)), replace=False)
    return sorted(int(i) for i in chosen)


def evaluate(job: Job, theta: Tensor, test: Records | None = None, batch: int = 1024) -> tuple[float, float]:
    """Accuracy and mean loss on the server's test set."""
    test = test or job.test
    right, loss = 0, 0.0
    for first in range(0, len(test.labels), batch):
        rows = torch.arange(first, min(first + batch, len(test.labels)), device=job.device)
        inputs, labels = test.take(rows)
        scores = job.model.scores(theta, inputs)
        right += int((scores.argmax(1) == labels).sum())
        loss += float(job.model.loss(scores, labels).sum())
    return right / len(test.labels), loss / len(test.labels)


def _refuse_nonfinite(server: Any, t: int) -> None:
    for part in dataclasses.fields(server):
        value = getattr(server, part.name)
        if isinstance(value, Tensor) and not bool(value.isfinite().all()):
            raise DivergedError(
                f"after round {t} the server's {part.name} is no longer finite: lower algorithm.lr; "
                "what was computed before is kept"
            )

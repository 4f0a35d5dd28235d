"""Train softmax regression with many learning rates at once, as the library would one by one.

A record's gradient is the outer product of its error and its features. So its norm and the clipped
sum follow from two small matrices, and no gradient is written down. All learning rates see equal
batches and equal noise. Everything else is the library's own: partition, cohorts, batches, noise,
clipping rule, algorithm and accountant. `check` compares one round with the library's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Context
from dpfed.privacy.clipping import factors
from dpfed.privacy.sampling import batches
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.participation import eligible_clients
from dpfed.training.evaluation import evaluate
from dpfed.training.job.job import Job
from dpfed.training.round_context import context, first_state, learning_rate
from dpfed.training.round_loop import aggregate, choose


@dataclass(frozen=True)
class Row:
    """One of the runs that are trained together: a learning rate and its schedule."""

    lr: float
    schedule: str = "constant"


class Records:
    """The features of a job's records as its linear model reads them, with their norms."""

    def __init__(self, job: Job) -> None:
        (inputs,) = job.private.records.inputs.values()
        scale = 1 / job.public.spec.white if job.public.spec.kind == "image" else 1.0
        self.x = inputs.flatten(1).float() * scale
        self.norms = (torch.linalg.vector_norm(self.x, dim=1).square() + 1).sqrt()
        self.labels = job.private.records.labels
        self.classes = len(job.public.classes)


class JointOracle:
    """The oracle of one round for all rows: it returns noised gradients `[rows, S, P]`."""

    def __init__(self, job: Job, records: Records, t: int, cohort: Sequence[int]) -> None:
        self._job = job
        self._records = records
        self._cohort = cohort
        plan = job.plan
        streams = job.streams
        self._batches = [batches(plan, i, streams.generator("batch", t, i)) for i in cohort]
        self._noise = [streams.noise(t, i, job.device) for i in cohort]
        self._phi = torch.tensor([[plan.phi(i)] for i in cohort], dtype=torch.float32)

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(theta)
        noise = torch.empty(theta.shape[-1])
        for s, client in enumerate(self._cohort):
            units = next(self._batches[s])
            rows, _ = self._job.private.shards.slots(client, units)
            out[:, s] = self._sums(theta[:, s], torch.from_numpy(rows))
            self._noise[s].fill(noise)
            out[:, s] += self._job.plan.noise_std(client) * noise
            out[:, s] /= float(self._job.plan.expected[client])
        return out, self._phi

    def _sums(self, theta: Tensor, rows: Tensor) -> Tensor:
        """Return the clipped sums of a client's batch at each row of theta, `[rows, P]`."""
        records = self._records
        x = records.x[rows]
        width = records.classes * x.shape[1]
        weight = theta[:, :width].reshape(-1, x.shape[1])
        logits = torch.addmm(theta[:, width:].flatten(), x, weight.t())
        error = torch.softmax(logits.view(len(rows), len(theta), records.classes), 2)
        error[torch.arange(len(rows)), :, records.labels[rows]] -= 1
        norm = torch.linalg.vector_norm(error, dim=2) * records.norms[rows, None]
        plan = self._job.plan
        error = error * factors(norm, torch.full_like(norm, plan.clip), plan.clipping).unsqueeze(2)
        sums = error.flatten(1).t() @ x
        return torch.cat([sums.view(len(theta), width), error.sum(0)], 1)


def train(job: Job, rows: Sequence[Row], averages: Sequence[float]) -> list[dict[float, Any]]:
    """Return for each row, by decay of the average over rounds, the final vector `[P]`."""
    records = Records(job)
    servers = [first_state(job).server for _ in rows]
    sums = {a: torch.zeros(len(rows), job.space.size) for a in averages}
    requests = np.zeros(job.schedule.clients, dtype=np.int64)
    run = job.config.run
    for t in range(1, run.rounds + 1):
        cohort = choose(job, t, eligible_clients(requests, job.schedule.cap, None), requests)
        requests[cohort] += 1
        ctxs = [
            replace(
                context(job, t, cohort),
                lr=torch.tensor(learning_rate(row.lr, row.schedule, t, run.rounds)).double(),
                lr0=torch.tensor(row.lr).double(),
            )
            for row in rows
        ]
        servers = one_round(job, records, t, cohort, ctxs, servers)
        for decay, total in sums.items():
            total.mul_(decay).add_(torch.stack([s.theta for s in servers]), alpha=1 - decay)
    return [
        {a: total[i] / (1 - a**run.rounds) for a, total in sums.items()} for i in range(len(rows))
    ]


def one_round(
    job: Job,
    records: Records,
    t: int,
    cohort: Sequence[int],
    ctxs: Sequence[Context],
    servers: Sequence[Any],
) -> list[Any]:
    algorithm = job.algorithm
    oracle = JointOracle(job, records, t, cohort)
    starts = [algorithm.start(ctx, server, {}) for ctx, server in zip(ctxs, servers, strict=True)]
    local = _joined(starts)
    joint = replace(ctxs[0], lr=torch.stack([c.lr for c in ctxs]).view(-1, 1, 1).float())
    for k in range(1, job.config.run.local_steps + 1):
        step = torch.full((), k, dtype=torch.float64)
        local = algorithm.step(joint, local, oracle, step)  # type: ignore[arg-type]
    found = []
    for i, (ctx, server) in enumerate(zip(ctxs, servers, strict=True)):
        message, _ = algorithm.finish(ctx, server, _part(local, i))
        mean = {name: value.mean(0) for name, value in message.items()}
        found.append(algorithm.aggregate(ctx, server, mean))
    return found


def _joined(states: Sequence[Any]) -> Any:
    """Join the local states: fields `[S, P]` to `[rows, S, P]`, `[P]` to `[rows, 1, P]`."""
    joined = {}
    for field in dataclasses.fields(states[0]):
        values = [getattr(state, field.name) for state in states]
        if values[0].dim() == 2:
            joined[field.name] = torch.stack(values)
        elif values[0].numel() > 1:
            joined[field.name] = torch.stack(values).unsqueeze(1)
        else:
            joined[field.name] = values[0]
    return replace(states[0], **joined)


def _part(joined: Any, i: int) -> Any:
    values = {f.name: getattr(joined, f.name) for f in dataclasses.fields(joined)}
    return replace(joined, **{k: v[i] if v.dim() == 3 else v for k, v in values.items()})


def scores(job: Job, theta: Tensor) -> tuple[float, float]:
    accuracy, loss = evaluate(job, theta)
    return float(accuracy or 0.0), float(loss or 0.0)


def alone(job: Job) -> tuple[float, float]:
    """Train a job of any model with the library's own loop; return accuracy and loss."""
    fleet = Fleet(job)
    state = first_state(job)
    requests = np.zeros(job.schedule.clients, dtype=np.int64)
    for t in range(1, job.config.run.rounds + 1):
        cohort = choose(job, t, eligible_clients(requests, job.schedule.cap, None), requests)
        requests[cohort] += 1
        mean, answered = fleet.run_cohort(t, state, cohort)
        state = aggregate(job, t, state, cohort, mean, answered)
    return scores(job, state.result)


def check(job: Job) -> float:
    """Return the largest difference to the library's own first round, relative to its change."""
    cohort = list(range(job.schedule.cohort))
    mean, _ = Fleet(job).run_cohort(1, first_state(job), cohort)
    ctx = context(job, 1, cohort)
    server = first_state(job).server
    (after,) = one_round(job, Records(job), 1, cohort, [ctx], [server])
    change = after.theta - server.theta
    return float((change - mean["delta"]).abs().max() / mean["delta"].abs().max())

"""The fleet: S clients of a cohort computed side by side, as rows of one tensor `[S, P]`.

A cohort that does not fit is split into fleets of `fleet_size`. Random streams belong to clients, not to fleets, so the
split changes nothing but the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Context, Message
from dpfed.engine.setup import Job
from dpfed.privacy.oracle import FleetOracle


def learning_rate(base: float, schedule: str, t: int, rounds: int) -> float:
    """η_t, constant within a round; the cosine never reaches zero, so that dividing by it is safe (SPEC 1.2)."""
    return base if schedule == "constant" else 0.5 * base * (1 + math.cos(math.pi * (t - 1) / rounds))


def context(job: Job, t: int, clients: Sequence[int], answered: int = 0) -> Context:
    """The public facts of round t for these clients."""

    def scalar(x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64, device=job.device)

    run, base = job.config.run, job.algorithm.lr
    phi = torch.tensor([[job.plan.phi(i)] for i in clients], dtype=torch.float64).to(torch.float32)
    return Context(
        space=job.space,
        N=job.schedule.clients,
        S=len(clients),
        T=run.rounds,
        K=run.local_steps,
        t=scalar(t),
        lr=scalar(learning_rate(base, run.lr_schedule, t, run.rounds)),
        lr0=scalar(base),
        phi=phi.to(job.device),
        equal_phi=job.plan.equal_phi,
        answered=answered,
    )


class Fleet:
    """The backend that computes a cohort in this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        size = job.config.run.fleet_size
        self._size = job.schedule.cohort if size == "auto" else size

    def run_cohort(self, t: int, server: Any, clients: Sequence[int]) -> tuple[Message, int]:
        """The mean of the clients' messages, and how many answered."""
        total: Message = {}
        weights = self._weights(clients)
        for first in range(0, len(clients), self._size):
            part = clients[first : first + self._size]
            message = self._fleet(t, server, part)
            weight = weights[first : first + self._size]
            for name, value in message.items():
                summed = torch.tensordot(weight, value, dims=1)
                total[name] = total[name] + summed if name in total else summed
        return total, len(clients)

    def _fleet(self, t: int, server: Any, clients: Sequence[int]) -> Message:
        job = self._job
        ctx = context(job, t, clients)
        oracle = FleetOracle(
            job.model,
            job.records,
            job.shards,
            job.plan,
            job.streams,
            t,
            clients,
            steps=ctx.K,
            max_slots=job.config.run.max_slots,
        )
        local = job.algorithm.start(ctx, server, {})
        for k in range(1, ctx.K + 1):
            local = job.algorithm.step(ctx, local, oracle, torch.tensor(k, dtype=torch.float64, device=job.device))
        message, _ = job.algorithm.finish(ctx, server, local)
        return message

    def _weights(self, clients: Sequence[int]) -> Tensor:
        """Weights of the mean, public constants that sum to one."""
        if self._job.algorithm.agg_weights == "size":
            weights = torch.tensor([float(self._job.plan.sizes[i]) for i in clients])
        else:
            weights = torch.ones(len(clients))
        return (weights / weights.sum()).to(self._job.device)

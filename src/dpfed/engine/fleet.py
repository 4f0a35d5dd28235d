"""The fleet: S clients of a cohort computed side by side, as rows of one tensor `[S, P]`.

A cohort that does not fit is split into fleets of `fleet_size`. Random streams belong to clients, not to fleets, so the
split changes nothing but the order of additions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Context, Message
from dpfed.engine.memory import ClientMemory
from dpfed.engine.setup import Job
from dpfed.engine.state import State
from dpfed.privacy.oracle import FleetOracle


def learning_rate(base: float, schedule: str, t: int, rounds: int) -> float:
    """η_t, constant within a round; the cosine never reaches zero, so that dividing by it is safe (SPEC 1.2)."""
    return base if schedule == "constant" else 0.5 * base * (1 + math.cos(math.pi * (t - 1) / rounds))


def context(job: Job, t: int, clients: Sequence[int], clip: float | None = None, answered: int = 0) -> Context:
    """The public facts of round t, with this clip norm, for these clients."""

    def scalar(x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64, device=job.device)

    run, base = job.config.run, job.algorithm.lr
    plan = job.plan if clip is None else job.plan.at(clip)
    phi = torch.tensor([[plan.phi(i)] for i in clients], dtype=torch.float64).to(torch.float32)
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
        varying_phi=job.plan.clipping.counts,
        answered=answered,
    )


LocalWatch = Callable[[Context, Sequence[int], Any], None]
"""Is shown the clients' states at the end of a round; for diagnostics of simulated clients only."""


class Fleet:
    """The backend that computes a cohort in this process."""

    def __init__(self, job: Job, memory: ClientMemory | None = None, watch: LocalWatch | None = None) -> None:
        self._job = job
        if memory is None:  # an empty one is false, and must not be replaced
            memory = ClientMemory(job.algorithm.remembers, job.space.size, Path(), sys.maxsize)
        self.memory = memory
        self._watch = watch
        size = job.config.run.fleet_size
        self._size = job.schedule.cohort if size == "auto" else size

    def run_cohort(self, t: int, state: State, clients: Sequence[int]) -> tuple[Message, int]:
        """The mean of the clients' messages, and how many answered."""
        total: Message = {}
        weights = self._weights(clients)
        for first in range(0, len(clients), self._size):
            part = clients[first : first + self._size]
            message = self._fleet(t, state, part)
            weight = weights[first : first + self._size]
            for name, value in message.items():
                summed = torch.tensordot(weight, value, dims=1)
                total[name] = total[name] + summed if name in total else summed
        return total, len(clients)

    def _fleet(self, t: int, state: State, clients: Sequence[int]) -> Message:
        job, server = self._job, state.server
        ctx = context(job, t, clients, state.clip)
        oracle = FleetOracle(
            job.model,
            job.records,
            job.shards,
            job.plan.at(state.clip),
            job.streams,
            t,
            clients,
            steps=ctx.K,
            max_slots=job.config.run.max_slots,
            view=job.view,
            grid=job.config.privacy.grid is True,
        )
        local = job.algorithm.start(ctx, server, self.memory.gather(clients, job.device))
        for k in range(1, ctx.K + 1):
            local = job.algorithm.step(ctx, local, oracle, torch.tensor(k, dtype=torch.float64, device=job.device))
        message, memory = job.algorithm.finish(ctx, server, local)
        self.memory.put(t, clients, memory)
        if self._watch is not None:
            self._watch(ctx, clients, local)
        return message | {"below": oracle.below} if job.plan.clipping.counts else message

    def _weights(self, clients: Sequence[int]) -> Tensor:
        """Weights of the mean, public constants that sum to one."""
        if self._job.algorithm.agg_weights == "size":
            weights = torch.tensor([float(self._job.plan.sizes[i]) for i in clients])
        else:
            weights = torch.ones(len(clients))
        return (weights / weights.sum()).to(self._job.device)

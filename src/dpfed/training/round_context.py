"""The public facts of a round, and the server's state before round 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Context
from dpfed.training.job.job import Job
from dpfed.training.server_state import State


def learning_rate(base: float, schedule: str, t: int, rounds: int) -> float:
    """Return the learning rate of round t, which is constant within the round and never zero."""
    if schedule == "constant":
        return base
    return 0.5 * base * (1 + math.cos(math.pi * (t - 1) / rounds))


def context(
    job: Job, t: int, clients: Sequence[int], clip: float | None = None, answered: int = 0
) -> Context:
    """Return the public facts of round t for these clients, with this clip norm."""
    run = job.config.run
    plan = job.plan if clip is None else job.plan.at(clip)
    phi = torch.from_numpy(plan.phis(np.asarray(clients, dtype=np.int64)))
    phi = phi.to(torch.float32).unsqueeze(1).to(job.device, non_blocking=True)
    rate = learning_rate(job.algorithm.lr, run.lr_schedule, t, run.rounds)
    return Context(
        space=job.space,
        N=job.schedule.clients,
        S=len(clients),
        T=run.rounds,
        K=run.local_steps,
        t=scalar(t, job.device),
        lr=scalar(rate, job.device),
        lr0=scalar(job.algorithm.lr, job.device),
        phi=phi,
        equal_phi=job.plan.equal_phi,
        varying_phi=job.plan.clipping.counts,
        answered=answered,
    )


def scalar(value: float, device: torch.device) -> Tensor:
    """Return the number as a float64 tensor, filled on the device so that nothing waits for it."""
    return torch.full((), value, dtype=torch.float64, device=device)


def first_state(job: Job) -> State:
    """Return the server's state before round 1."""
    everyone = context(job, 1, range(job.schedule.clients))
    state = State(job.algorithm.init(everyone, job.theta), job.plan.clip)
    return state.averaging() if job.config.run.average else state

"""Build the public numbers of a round (`Context`), and the server's state before round 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Context, Space
from dpfed.privacy.plan import Plan
from dpfed.training.job.job import Job
from dpfed.training.server_state import Best, State


def learning_rate(base: float, schedule: str, t: int, rounds: int) -> float:
    """Return the learning rate of round t, where t is 1 to `rounds`.

    base      the configured learning rate
    schedule  "constant", or "cosine" for a cosine decay that stays above zero
    """
    if schedule == "constant":
        return base
    return 0.5 * base * (1 + math.cos(math.pi * (t - 1) / rounds))


@dataclass(frozen=True)
class RoundFigures:
    """The public numbers of a round that the privacy plan does not contain.

    t            number of the round
    rounds       number T of all rounds
    local_steps  number K of local steps in a round
    clients      number N of clients of the run
    lr           learning rate of this round
    base_lr      configured learning rate
    equal_phi    True if all clients have the same noise variance Φ
    answered     number of messages in the cohort's mean; only the server's step uses this number
    """

    t: int
    rounds: int
    local_steps: int
    clients: int
    lr: float
    base_lr: float
    equal_phi: bool
    answered: int = 0


def context(
    job: Job, t: int, clients: Sequence[int], clip: float | None = None, answered: int = 0
) -> Context:
    """Return the context of round t: the public numbers that the algorithm's methods need.

    clients   numbers of the clients that compute
    clip      clip norm of the round; None for the clip norm of the plan
    answered  number of messages in the cohort's mean; only the server's step uses this number
    """
    run = job.config.run
    base_lr = job.algorithm.base_lr
    figures = RoundFigures(
        t,
        run.rounds,
        run.local_steps,
        job.schedule.clients,
        learning_rate(base_lr, run.lr_schedule, t, run.rounds),
        base_lr,
        job.plan.equal_phi,
        answered,
    )
    plan = job.plan if clip is None else job.plan.at(clip)
    return build_context(job.space, plan, clients, figures, job.device)


def build_context(
    space: Space, plan: Plan, clients: Sequence[int], figures: RoundFigures, device: torch.device
) -> Context:
    """Return the context of a round from the privacy plan and the round's numbers.

    Simulations and network clients both call this function, so that they compute equal steps.
    """
    phi = torch.from_numpy(plan.phis(np.asarray(clients, dtype=np.int64)))
    return Context(
        space=space,
        N=figures.clients,
        S=len(clients),
        T=figures.rounds,
        K=figures.local_steps,
        t=scalar(figures.t, device),
        lr=scalar(figures.lr, device),
        lr0=scalar(figures.base_lr, device),
        phi=phi.to(torch.float32).unsqueeze(1).to(device, non_blocking=True),
        equal_phi=figures.equal_phi,
        varying_phi=plan.clipping.counts,
        answered=figures.answered,
    )


def scalar(value: float, device: torch.device) -> Tensor:
    """Return a number as a float64 scalar tensor on the device.

    The device itself writes the number. A copy from the host would wait for earlier work on the
    GPU.
    """
    return torch.full((), value, dtype=torch.float64, device=device)


def first_state(job: Job) -> State:
    """Return the server's state before round 1."""
    everyone = context(job, 1, range(job.schedule.clients))
    state = State(job.algorithm.init(everyone, job.theta), job.plan.clip)
    if job.config.run.keep == "best" or job.config.run.early_stopping is not None:
        state = replace(state, best=Best.none_yet(state.theta))
    return state.averaging() if job.config.run.average else state

"""The context and the K local steps of some clients, for simulations and network clients alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm, ClientState, Context, Message, Space
from dpfed.privacy.oracle import FleetOracle
from dpfed.privacy.plan import Plan


@dataclass(frozen=True)
class LocalResult:
    """The clients' states after the last step, their messages `[S, ...]` and what they remember."""

    states: Any
    message: Message
    memory: ClientState


@dataclass(frozen=True)
class RoundFigures:
    """The public figures of round `t` besides the plan.

    clients      number of clients N of the run
    lr, base_lr  learning rate of this round, and the algorithm's own
    answered     number of messages in the mean, for the server's step
    """

    t: int
    rounds: int
    local_steps: int
    clients: int
    lr: float
    base_lr: float
    equal_phi: bool
    answered: int = 0


def round_context(
    space: Space, plan: Plan, cohort: Sequence[int], figures: RoundFigures, device: torch.device
) -> Context:
    """Return the context of a round for these clients of the plan."""

    def scalar(x: float) -> Tensor:
        # Filled on the device: a copy from the host waits for all queued work.
        return torch.full((), x, dtype=torch.float64, device=device)

    phi = torch.from_numpy(plan.phis(np.asarray(cohort, dtype=np.int64))).to(torch.float32)
    return Context(
        space=space,
        N=figures.clients,
        S=len(cohort),
        T=figures.rounds,
        K=figures.local_steps,
        t=scalar(figures.t),
        lr=scalar(figures.lr),
        lr0=scalar(figures.base_lr),
        phi=phi.unsqueeze(1).to(device, non_blocking=True),
        equal_phi=figures.equal_phi,
        varying_phi=plan.clipping.counts,
        answered=figures.answered,
    )


def run_local_steps(
    algorithm: Algorithm,
    ctx: Context,
    server: Any,
    memory: ClientState,
    oracle: FleetOracle,
    after_step: Callable[[int], None] = lambda k: None,
) -> LocalResult:
    """Run K local steps of the oracle's clients from the server's state.

    `after_step` gets the number of steps done. It may raise to end the round.
    """
    states = algorithm.start(ctx, server, memory)
    for k in range(1, ctx.K + 1):
        step = torch.full((), k, dtype=torch.float64, device=ctx.t.device)
        states = algorithm.step(ctx, states, oracle, step)
        after_step(k)
    message, kept = algorithm.finish(ctx, server, states)
    if ctx.varying_phi:
        message = message | {"below": oracle.below}
    return LocalResult(states, message, kept)

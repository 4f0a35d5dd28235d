"""The K local steps of some clients: the one loop that simulations and network clients share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpfed.algorithms.base import Algorithm, ClientState, Context, Message
from dpfed.privacy.oracle import FleetOracle


@dataclass(frozen=True)
class LocalResult:
    """The clients' states after the last step, their messages `[S, ...]` and what they remember."""

    states: Any
    message: Message
    memory: ClientState


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

"""The loop over the K local steps of a round, for simulated clients and clients on a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpfed.algorithms.base import Algorithm, ClientState, Context, Message
from dpfed.privacy.oracle import FleetOracle


@dataclass(frozen=True)
class LocalResult:
    """The results of S clients after the last local step of a round.

    states   the algorithm's state of the clients
    message  the tensors that each client sends to the server, `[S, ...]`
    memory   the vectors that each client keeps for its next round, such as control variates
    """

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
    """Run the K local steps of a round for S clients, and return their results.

    server      the algorithm's state of the server, from which the clients start
    memory      the vectors that the clients stored in earlier rounds
    oracle      returns noised gradients of the clients' records
    after_step  called with the number of completed steps; may raise an error to end the round
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

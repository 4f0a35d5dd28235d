"""Stop a run if the server's state or a client's message contains NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dpfed.algorithms.base import Message
from dpfed.errors import DivergedError
from dpfed.training.server_state import State


def begin_finite_check(state: State, t: int) -> Callable[[], None]:
    """Start a check that the state after round t is finite; return a function to finish the check.

    The GPU runs the check while the CPU continues with other work. The returned function waits for
    the result and raises DivergedError if the state contains NaN or infinity.
    """
    names, values = zip(*state.tensors().items(), strict=True)
    flags = torch.stack(
        [value.isfinite().all().to(state.theta.device, non_blocking=True) for value in values]
    )
    copied: torch.cuda.Event | None = None
    if flags.is_cuda:
        on_host = torch.empty(len(flags), dtype=torch.bool, pin_memory=True)
        on_host.copy_(flags, non_blocking=True)
        copied = torch.cuda.current_stream(flags.device).record_event()
        flags = on_host

    def require_finite() -> None:
        if copied is not None:
            copied.synchronize()
        for name, finite in zip(names, flags.tolist(), strict=True):
            if not finite:
                raise DivergedError(
                    f"after round {t} the server's {name} is no longer finite: lower algorithm.lr; "
                    "what was computed before is kept"
                )

    return require_finite


def require_finite_messages(t: int, clients: Sequence[int], values: Message) -> None:
    """Raise DivergedError if a message or a stored vector of a client contains NaN or infinity.

    values  messages and stored vectors: tensors `[S, ...]` by name, one row for each of S clients

    The error names the client. The values are noised, so the error reveals nothing about a record.
    """
    for name, value in values.items():
        finite = value.reshape(len(clients), -1).isfinite().all(1)
        if not bool(finite.all()):
            client = clients[int(finite.int().argmin())]
            raise DivergedError(
                f"in round {t} the {name} of client {client} is no longer finite: "
                "lower algorithm.lr; what was computed before is kept"
            )

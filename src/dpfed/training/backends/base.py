"""The contract of a backend: it computes the mean of a cohort's messages, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dpfed.algorithms.base import Message
from dpfed.errors import DpfedError
from dpfed.training.server_state import State

WaitForCharge = Callable[[], None]


def no_charge() -> None:
    """Stand for the charge of a run without privacy."""


class Backend(Protocol):
    """The fleet in this process, several processes, or clients on a network."""

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: WaitForCharge = no_charge,
    ) -> tuple[Message, int]:
        """Return the mean of the clients' messages, and the number of clients that answered.

        `wait_for_charge` returns when the round's charge is on disk, and raises if it cannot be
        written. A backend calls it before a noised value leaves an oracle.
        """


class RemoteBackend(Backend, Protocol):
    """A backend whose JSON-serialisable state is part of the checkpoint."""

    def restore(self, remembered: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint."""

    def after(self, t: int, state: State) -> dict[str, Any]:
        """Return the backend's own state after round t, which ended in this server state."""

    def report(self) -> dict[str, Any]:
        """Return the backend's entries of the run's result."""


class LostRoundError(DpfedError):
    """A round gave no result; the server's state stays, and the run continues."""

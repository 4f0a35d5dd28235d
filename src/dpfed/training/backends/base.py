"""The interface of a backend, which computes the mean of a cohort's messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dpfed.algorithms.base import Message
from dpfed.errors import DpfedError
from dpfed.training.server_state import State

WaitForCharge = Callable[[], None]


def no_charge() -> None:
    """Return at once, because a run without privacy has no charge to wait for."""


class Backend(Protocol):
    """Computes cohorts in this process, in several processes, or at clients on a network."""

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: WaitForCharge = no_charge,
    ) -> tuple[Message, int]:
        """Return (mean of the clients' messages, number of clients that answered).

        t                number of the round
        state            the server's state before the round
        clients          numbers of the clients in the cohort
        wait_for_charge  waits until the round's charge is on disk; raises if it cannot be written

        The backend must call `wait_for_charge` before a noised value leaves an oracle.
        """


class RemoteBackend(Backend, Protocol):
    """A backend whose JSON-serialisable state is part of the checkpoint."""

    def restore(self, remembered: Mapping[str, Any]) -> None:
        """Continue from the state `remembered`, which `after` returned and a checkpoint stored."""

    def after(self, t: int, state: State) -> dict[str, Any]:
        """Return the backend's state after round t, to be stored in the checkpoint.

        state  the server's state after round t
        """

    def report(self) -> dict[str, Any]:
        """Return the entries that the backend adds to the run's result."""


class LostRoundError(DpfedError):
    """A round ended without a mean message. The run continues with the state before the round."""

"""The interface of a backend, which computes the mean of the messages of a round's clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dpfed.algorithms.base import Message
from dpfed.errors import DpfedError
from dpfed.training.server_state import State

WaitForCharge = Callable[[], None]


def no_charge() -> None:
    """Do nothing: the default `wait_for_charge`, for runs without privacy and ledger."""


class Backend(Protocol):
    """Interface of an object that computes the clients of a round and averages their messages.

    Clients compute in this process, in several processes, or on a network.
    """

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
        wait_for_charge  waits until the ledger has the round's cost on disk; raises if that fails

        The backend must call `wait_for_charge` before an oracle returns a noised gradient.
        Otherwise a crash could leave a released value that no ledger has counted.
        """


class RemoteBackend(Backend, Protocol):
    """A backend for clients on other machines. Checkpoints contain its state as JSON values."""

    def restore(self, remembered: Mapping[str, Any]) -> None:
        """Restore the backend of a resumed run.

        remembered  the state that `after` returned and that a checkpoint stored
        """

    def after(self, t: int, state: State) -> dict[str, Any]:
        """Return the backend's state after round t, to be stored in the checkpoint.

        state  the server's state after round t
        """

    def report(self) -> dict[str, Any]:
        """Return the entries that this backend adds to the result of the run."""


class LostRoundError(DpfedError):
    """A round has ended without a mean message. The run continues with the state before it."""

"""The types that describe a run's progress: one finished round, and how far the run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dpfed.training.server_state import State


@dataclass(frozen=True)
class Round:
    """The figures of one round. Accuracy and loss are those of the server's public test set.

    clip            the clip norm of this round; it changes under quantile clipping
    cohort          the number of clients that took part, for the server only
    eligible        the number of clients that the cohort was drawn from, for the server only
    theta           the evaluated vector: the last iterate, or with `run.average` the average
    last_accuracy   with `run.average`: the accuracy of the last iterate
    """

    t: int
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    cohort: int
    eligible: int
    clip: float
    seconds: float
    theta: Tensor = field(repr=False)
    last_accuracy: float | None = None


@dataclass(frozen=True)
class Progress:
    """The number of completed rounds, the state after them, and the seconds that they took."""

    t: int
    state: State
    seconds: float = 0.0

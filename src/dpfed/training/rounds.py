"""Types that describe the progress of a run: `Round` is one round, `Progress` all rounds so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dpfed.training.server_state import Best, State


@dataclass(frozen=True)
class Round:
    """The results of one completed round.

    t               number of the round; 0 is the evaluation before training
    accuracy, loss  scores on the server's public test set; None if the round was not evaluated;
                    regression has no accuracy
    epsilon         largest epsilon of any client so far; None without privacy or evaluation
    cohort          number of clients that took part; the server keeps this secret
    eligible        number of clients from which the cohort was drawn; the server keeps this secret
    clip            clip norm C of this round; only quantile clipping changes it
    seconds         training time since round 1
    theta           trained vector after the round; with `run.average` the average of these vectors
    last_accuracy   accuracy of the vector that is not averaged, with `run.average` only
    score           value of `run.metric`, if it follows from none of the other scores
    r2              share of the test labels' variance that is explained, for regression only
    best            the best round so far, with `run.keep` or `run.early_stopping` only
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
    score: float | None = None
    r2: float | None = None
    best: Best | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Progress:
    """The progress of a run: its number of completed rounds, and the state after them.

    t        number of completed rounds
    state    the server's state after these rounds
    seconds  training time of these rounds
    """

    t: int
    state: State
    seconds: float = 0.0

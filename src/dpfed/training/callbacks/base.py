"""Base classes of callbacks: progress, metrics, checkpoints, trackers, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import Job
from dpfed.training.rounds import Progress, Round


class Callback:
    """Base class of objects that a run calls at its events, such as the end of a round.

    Its methods do nothing: override those that you need. An exception in a callback ends the run.
    The privacy ledger is not a callback, because it must be charged before each round.
    """

    def on_start(self, job: Job) -> None:
        """Called when the job is built, before the first round of a new or a resumed run."""

    def on_activity(self, activity: Activity) -> None:
        """Called when work has advanced, inside a round or before the first round."""

    def on_round(self, round: Round) -> None:
        """Called after each completed round; round 0 is the evaluation before training."""

    def on_checkpoint(self, progress: Progress) -> None:
        """Called after a round when a checkpoint of this progress should be written."""

    def on_end(self, result: dict[str, Any]) -> None:
        """Called with the result after the last round; not called if the run stops early."""

    def close(self) -> None:
        """Free resources such as files; called once at the end of every run, even a failed run."""


class OnStart(Callback):
    """A callback that only calls one function, with the job (the prepared run), before round 1."""

    def __init__(self, function: Callable[[Job], None]) -> None:
        self._function = function

    def on_start(self, job: Job) -> None:
        self._function(job)


class Callbacks(Callback):
    """A callback that passes every event to its members, in order."""

    def __init__(self, members: Iterable[Callback] = ()) -> None:
        self.members = list(members)

    def on_start(self, job: Job) -> None:
        for member in self.members:
            member.on_start(job)

    def on_activity(self, activity: Activity) -> None:
        for member in self.members:
            member.on_activity(activity)

    def on_round(self, round: Round) -> None:
        for member in self.members:
            member.on_round(round)

    def on_checkpoint(self, progress: Progress) -> None:
        for member in self.members:
            member.on_checkpoint(progress)

    def on_end(self, result: dict[str, Any]) -> None:
        for member in self.members:
            member.on_end(result)

    def close(self) -> None:
        for member in self.members:
            member.close()

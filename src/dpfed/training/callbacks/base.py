"""Callbacks watch a run: progress, metrics, checkpoints, trackers, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import Job
from dpfed.training.rounds import Progress, Round


class Callback:
    """A watcher of a run. Override the events that you need; an exception ends the run.

    The ledger is no callback: the round loop charges it itself.
    """

    def on_start(self, job: Job) -> None:
        """The job is built and round 1 comes next; a resumed run calls this too."""

    def on_activity(self, activity: Activity) -> None:
        """Work inside a round, or before the first one, has advanced."""

    def on_round(self, round: Round) -> None:
        """A round is complete; round 0 is the evaluation before training."""

    def on_checkpoint(self, progress: Progress) -> None:
        """A checkpoint is due after this progress."""

    def on_end(self, result: dict[str, Any]) -> None:
        """The run is finished, with this result."""

    def close(self) -> None:
        """Release resources; called once, however the run ended."""


class OnStart(Callback):
    """A callback that calls one function before round 1."""

    def __init__(self, function: Callable[[Job], None]) -> None:
        self._function = function

    def on_start(self, job: Job) -> None:
        self._function(job)


class Callbacks(Callback):
    """A list of callbacks that get every event in order."""

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

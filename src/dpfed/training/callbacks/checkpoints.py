"""The callback that writes checkpoints, and the rule that selects the rounds with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from dpfed.training.backends.base import RemoteBackend
from dpfed.training.budget.spending import Spending
from dpfed.training.callbacks.base import Callback
from dpfed.training.job.job import Job
from dpfed.training.rounds import Progress
from dpfed.training.run_folder.checkpoint import Checkpoints
from dpfed.training.run_folder.folder import RunFolder

# Least number of seconds between two checkpoints of a simulation on a GPU. A round there may take
# less time than a checkpoint.
MIN_INTERVAL_S = 1.0


class CheckpointWriter(Callback):
    """Callback that writes a checkpoint whenever one is due.

    The checkpoint contains the server's state, the vectors that clients keep between rounds, and
    the number of rounds that each client took part in. If the clients run on other machines, it
    also contains what the server must remember about them (see `RemoteBackend.after`).
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        spending: Spending,
        folder: RunFolder,
        remote: RemoteBackend | None,
    ) -> None:
        self._checkpoints = checkpoints
        self._spending = spending
        self._folder = folder
        self._remote = remote

    def on_checkpoint(self, progress: Progress) -> None:
        known = self._remote.after(progress.t, progress.state) if self._remote else None
        # If the clients are on other machines, wait until the checkpoint is on disk. They can
        # repeat only their last message, so the server must resume from the newest round.
        wait = self._remote is not None
        rounds_taken = self._spending.rounds_taken
        self._checkpoints.save(progress, rounds_taken, known, self._folder.sync, wait=wait)


def checkpoints_due(job: Job, clock: Callable[[], float] = time.monotonic) -> Callable[[int], bool]:
    """Return a function from a round's number to True if a checkpoint follows this round.

    Call the function once for each round, in order. By default every round with real noise has a
    checkpoint, because a repeated round would cost privacy again.

    clock  function that returns the time in seconds
    """
    run = job.config.run
    every = run.checkpoint_every
    if job.served:
        return lambda t: True
    if every != "auto":
        return lambda t: every > 0 and t % every == 0
    if job.device.type != "cuda" or run.noise == "os":
        return lambda t: True
    last = clock()

    def due(t: int) -> bool:
        nonlocal last
        now = clock()
        if now - last < MIN_INTERVAL_S and t < run.rounds:
            return False
        last = now
        return True

    return due

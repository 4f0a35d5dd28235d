"""Write checkpoints when they are due."""

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

# Seconds between checkpoints of a simulation on a GPU. Its rounds may take less than writing one.
MIN_INTERVAL_S = 1.0


class CheckpointWriter(Callback):
    """Write the server's state, the clients' memory and the rounds taken at each due round."""

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
        # Remote clients store only their last messages, so the server must not fall behind them.
        wait = self._remote is not None
        taken = self._spending.rounds_taken
        self._checkpoints.save_beside(progress, taken, known, self._folder.sync, wait=wait)


def checkpoints_due(job: Job, clock: Callable[[], float] = time.monotonic) -> Callable[[int], bool]:
    """Return a function that says after which rounds there is a checkpoint.

    It must be asked once for each round. With real noise every round has one, because a repeated
    round would cost privacy again.
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

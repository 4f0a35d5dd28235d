"""Run a training from configuration to result, for the command line and the Python interface.

configuration -> job (data, model, plan) -> for each round:
    cohort -> ledger -> backend -> aggregate -> evaluate -> callbacks
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.errors import DivergedError, InterruptedRunError, StoppedError
from dpfed.training.backends.execution import IN_PROCESS, Execution
from dpfed.training.backends.torchrun import Group, follow
from dpfed.training.callbacks.base import Callback, Callbacks
from dpfed.training.job.job import prepare
from dpfed.training.open_run import Mode, open_run, refuse_start
from dpfed.training.run_folder.folder import fresh_folder


def run(
    config: Config,
    out: Path | None = None,
    mode: Mode = "new",
    source: Source | None = None,
    callbacks: Sequence[Callback] = (),
    execution: Execution = IN_PROCESS,
) -> dict[str, Any]:
    """Train as configured, write everything to the run folder, and return the result.

    out        the run folder; None for a new folder under runs/
    mode       start a new run, replace the run in the folder, or resume it
    source     replaces the configured data source
    callbacks  are called at every event of the run
    execution  says where clients compute: in this process, by torchrun, or on a network
    """
    out = out or fresh_folder(config)
    refuse_start(config, out, mode, execution.served)
    watchers = Callbacks(callbacks)
    job = execution.prepare(config, source, watchers.on_activity)
    with open_run(job, out, mode, execution, watchers) as opened:
        watchers.on_start(opened.job)
        try:
            # The end of this `with` block waits until the last checkpoint is on disk.
            with opened.checkpoints:
                opened.loop.run(opened.saved.progress if opened.saved else None)
        except InterruptedRunError as error:
            raise opened.interrupted(error) from None
        except StoppedError as error:
            diverged = isinstance(error, DivergedError)
            opened.finish("stopped", stopped=str(error), diverged=diverged)
            raise
        result = opened.finish("finished")
        opened.loop.callbacks.on_end(result)
        return result


def assist(config: Config, group: Group) -> None:
    """On ranks other than 0 of torchrun, compute this process's clients in every round of a run.

    Rank 0 calls `run` instead.
    """
    follow(prepare(config), group)

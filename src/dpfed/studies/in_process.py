"""Compute the runs of a study in this process, so that models and data can stay in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfed.studies.outcomes import Task
from dpfed.studies.pool import run_pack
from dpfed.training.job.job_cache import JobCache


class InProcess:
    """A `Runner` that computes runs in this process, one after another.

    `start` returns only after the run has ended.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[str, str | None]] = deque()
        self._sources: dict[Any, Any] = {}
        self._cache = JobCache()

    def free(self) -> bool:
        return not self._ended

    def start(self, task: Task, folder: Path) -> None:
        self.start_pack([(task, folder)])

    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None:
        """Compute several runs together, and return when all have ended."""
        requests = [(task.key, task.tables, str(folder), task.tuning) for task, folder in pack]
        run_pack(
            requests, self._sources, self._cache, lambda key, said: self._ended.append((key, said))
        )

    def wait(self) -> tuple[str, str | None]:
        """Return the key of a run that has ended, and None or a sentence about its failure."""
        return self._ended.popleft()

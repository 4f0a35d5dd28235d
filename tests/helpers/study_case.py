"""A study without training: its runner writes the files of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfed.config import load, to_dict
from dpfed.registry import registry
from dpfed.studies.arms import parse_arms
from dpfed.studies.outcomes import Task
from dpfed.studies.study import Study
from dpfed.training.run_folder.files import METRICS, RESULT
from dpfed.training.run_folder.folder import versions

BASE = [
    "model.name=linear",
    "run.rounds=2",
    "run.local_steps=1",
    "privacy.batch=32",
    "privacy.sigma=2",
]


def study(
    algorithms: str = "dp-fedavg,dp-fedadamw", seeds: int = 2, sets: tuple[str, ...] = ()
) -> Study:
    base = load("digits", [*BASE, *sets], registry())
    return Study(to_dict(base), tuple(parse_arms(algorithms, base, registry(), {})), seeds)


def leave(folder: Path, accuracy: float, **more: Any) -> None:
    """Write the files of a finished run."""
    folder.mkdir(parents=True)
    rows = [{"round": t, "accuracy": accuracy * t / 2, "loss": 1.0} for t in range(3)]
    (folder / METRICS).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    epsilon = {"server_worst": 1.5, "server_max": 1.5, "third_party": 1.0}
    result = {
        "state": "finished",
        "rounds": 2,
        "test_records": 10**9,
        "epsilon": epsilon,
        "guarantee": "sworn",
        "versions": versions(),
        **more,
    }
    (folder / RESULT).write_text(json.dumps(result))


class FakeRunner:
    """A runner that scores by a function of the tables and may fail after `dies_after` runs."""

    def __init__(
        self, score: Callable[[Mapping[str, Any]], float | str], dies_after: int | None = None
    ) -> None:
        self.score, self.dies_after = score, dies_after
        self.ran: list[Task] = []
        self.packs: list[list[Task]] = []
        self._waiting: list[tuple[str, str | None]] = []

    def free(self) -> bool:
        return len(self._waiting) < 3

    def start(self, task: Task, folder: Path) -> None:
        if self.dies_after is not None and len(self.ran) >= self.dies_after:
            folder.mkdir(parents=True)
            # A process killed during a write leaves an incomplete file.
            (folder / RESULT).write_text('{"state": "runn')
            raise KeyboardInterrupt
        self.ran.append(task)
        found = self.score(task.tables)
        if isinstance(found, str):
            self._waiting.append((task.key, found))
            return
        leave(folder, found)
        self._waiting.append((task.key, None))

    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None:
        self.packs.append([task for task, _ in pack])
        for task, folder in pack:
            self.start(task, folder)

    def wait(self) -> tuple[str, str | None]:
        # Results may come in any order.
        return self._waiting.pop()

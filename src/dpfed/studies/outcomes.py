"""A run of a study: its folder is named after its configuration, and says by itself whether it is done."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.studies.search import Score
from dpfed.training.run_folder.files import METRICS, read_result, read_rows
from dpfed.training.run_folder.folder import versions


@dataclass(frozen=True)
class Task:
    """One run to be done. `cost` orders tasks, the longest first; `tuning` runs do not keep their model."""

    key: str
    label: str
    tables: Mapping[str, Any]
    tuning: bool
    cost: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """accuracy and loss of the last round that was scored, 0 and infinite for a run that diverged; failed: why there is none.

    records  how many records were scored
    blind    accuracy and loss of the best answer that is the same for all of them; 0 where answers are not classes
    """

    accuracy: float = 0.0
    loss: float = math.inf
    records: int = 1
    blind: tuple[float, float] = (0.0, 0.0)
    diverged: bool = False
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    guarantee: str = ""
    traffic: Mapping[str, int] | None = None
    curve: tuple[tuple[int, float], ...] = ()
    failed: str | None = None

    @property
    def score(self) -> Score:
        error = math.sqrt(self.accuracy * (1 - self.accuracy) / self.records)
        return Score(self.accuracy, self.loss, error, *self.blind)


def key_of(tables: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


def blind_of(result: Mapping[str, Any]) -> tuple[float, float]:
    """By the records of each class that a run has scored: the most frequent class, and the frequencies as probabilities."""
    counts = [
        int(row["support"]) for row in (result.get("metrics") or {}).get("per_class", {}).values()
    ]
    if any(count < 0 for count in counts):
        raise ValueError("a class with fewer than no records")
    shares = [count / sum(counts) for count in counts if count]
    return max(shares, default=0.0), -sum(share * math.log(share) for share in shares)


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of a run that is done; None when it is not, or was made by other versions of what computes it."""
    try:
        result = read_result(folder)
        if result["state"] not in ("finished", "stopped") or result["versions"] != versions():
            return None
        rows = read_rows(folder / METRICS)
        if [row["round"] for row in rows] != list(range(result["rounds"] + 1)):
            return None
        rows = [row for row in rows if row["accuracy"] is not None]
        curve = tuple((int(row["round"]), float(row["accuracy"])) for row in rows)
        loss = rows[-1]["loss"]
        diverged = bool(result.get("diverged", False))
        found = Outcome(
            accuracy=0.0 if diverged else curve[-1][1],
            loss=math.inf if diverged or loss is None else float(loss),
            records=int(result["test_records"]),
            blind=blind_of(result),
            diverged=diverged,
            epsilon=result["epsilon"],
            guarantee=result["guarantee"],
            traffic=result.get("traffic"),
            curve=curve,
        )
        return found if _plausible(found) else None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None


def _plausible(found: Outcome) -> bool:
    """Whether a run can have left this; where it cannot, the file is damaged and the run is done again."""
    figures = [value for value in found.epsilon.values() if value is not None]
    counts = list((found.traffic or {}).values())
    return (
        all(0 <= accuracy <= 1 for _, accuracy in found.curve)
        and not math.isnan(found.loss)
        and found.records >= 1
        and isinstance(found.guarantee, str)
        and found.guarantee.isprintable()
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in figures)
        and all(type(count) is int for count in counts)
    )


def clear(folder: Path) -> None:
    """Removes what an interrupted run left; it was a seeded simulation, so nothing is lost."""
    for patience in (0.2, 1.0, 5.0):
        if not folder.exists():
            return
        try:
            shutil.rmtree(folder)
        except OSError:
            time.sleep(patience)  # a worker of a study that was killed may be writing its last
    if folder.exists():
        raise DpfedError(
            f"{folder} cannot be removed to make room for a run: check its permissions"
        )

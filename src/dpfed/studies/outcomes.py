"""The runs of a study: tasks, and their outcomes as read from their folders."""

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

# Errors that reading a damaged file can raise.
DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True)
class Task:
    """One run. `tuning` runs do not keep their model; `cost` orders tasks, the longest first.

    key  hash of the configuration, and name of the folder
    """

    key: str
    label: str
    tables: Mapping[str, Any]
    tuning: bool
    cost: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    accuracy, loss  of the last scored round; 0 and infinity for a run that diverged
    records         number of scored records
    blind           accuracy and loss of the best answer that is the same for all records, or 0
    failed          the reason why there is no result, or None
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
    """Return accuracy and loss of the best answer that is the same for all scored records.

    The accuracy is the share of the largest class; the loss is the entropy of all shares.
    """
    per_class = (result.get("metrics") or {}).get("per_class", {})
    counts = [int(row["support"]) for row in per_class.values()]
    if any(count < 0 for count in counts):
        raise ValueError("a class with fewer than no records")
    shares = [count / sum(counts) for count in counts if count]
    return max(shares, default=0.0), -sum(share * math.log(share) for share in shares)


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome of an ended run; None if other versions made it or it is damaged."""
    try:
        result = read_result(folder)
        if result["state"] not in ("finished", "stopped") or result["versions"] != versions():
            return None
        rows = read_rows(folder / METRICS)
        if [row["round"] for row in rows] != list(range(result["rounds"] + 1)):
            return None
        scored = [row for row in rows if row["accuracy"] is not None]
        curve = tuple((int(row["round"]), float(row["accuracy"])) for row in scored)
        loss = scored[-1]["loss"]
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
    except DAMAGED:
        return None


def _plausible(found: Outcome) -> bool:
    """Return False for values that no run writes: the file is damaged and the run is repeated."""
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
    """Remove the folder of an interrupted run, a seeded simulation that can be repeated."""
    for pause_s in (0.2, 1.0, 5.0):
        if not folder.exists():
            return
        try:
            shutil.rmtree(folder)
        except OSError:
            # A worker of a killed study may still be writing.
            time.sleep(pause_s)
    if folder.exists():
        raise DpfedError(
            f"{folder} cannot be removed to make room for a run: check its permissions"
        )

"""The runs of a study: their descriptions (tasks), and their results (outcomes) read from disk."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.report.measures import ACCURACY, OTHER_SCORES, R2, Measure, measure_of
from dpfed.studies.search import Score
from dpfed.training.run_folder.files import METRICS, read_result, read_rows
from dpfed.training.run_folder.folder import versions

NO_R2 = "all numbers in one half of the test set are equal, so there is no R2"
# Errors that may be raised when a damaged file is read.
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
    """The description of one run of a study.

    key     hash of the configuration, and name of the run's folder
    label   the run in words, for progress lines
    tables  the configuration, one table for each section
    tuning  True for a run that searches for learning rates; its model is not kept
    cost    estimated duration relative to other runs, because the longest runs start first
    """

    key: str
    label: str
    tables: Mapping[str, Any]
    tuning: bool
    cost: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The result of one run of a study.

    accuracy, loss  values after the last scored round; 0 and infinity for a run that diverged. For
                    regression, accuracy is None
    r2              for regression: fraction of the variance of the labels that the model explains;
                    None for other tasks, and for a run that diverged
    other           further scores of the task, by name
    records         number of test records that were scored
    blind           accuracy and loss of a model that ignores its input; 0 if unknown
    diverged        True if a training value became infinite or NaN
    epsilon         epsilon by observer, such as "third_party"; values are None without privacy
    guarantee       the privacy guarantee in words
    traffic         numbers and bytes that one client sends and receives in a round
    curve           (round, score) of every scored round; the score is accuracy or R2
    failed          the reason why there is no result, or None
    """

    accuracy: float | None = 0.0
    loss: float = math.inf
    r2: float | None = None
    other: Mapping[str, float] = field(default_factory=dict)
    records: int = 1
    blind: tuple[float, float] = (0.0, 0.0)
    diverged: bool = False
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    guarantee: str = ""
    traffic: Mapping[str, int] | None = None
    curve: tuple[tuple[int, float], ...] = ()
    failed: str | None = None

    def main(self, measure: Measure) -> float | None:
        """Return the score by which methods are compared: accuracy, or R2 for regression."""
        return self.accuracy if measure is ACCURACY else self.r2

    @property
    def score(self) -> Score:
        """The score by which the search compares learning rates."""
        if self.accuracy is None:
            return Score(None, self.loss, 0.0, *self.blind)
        error = math.sqrt(self.accuracy * (1 - self.accuracy) / self.records)
        return Score(self.accuracy, self.loss, error, *self.blind)


def key_of(tables: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


def blind_of(result: Mapping[str, Any]) -> tuple[float, float]:
    """Return the accuracy and loss of the best model that ignores its input.

    Such a model always predicts the largest class. Its accuracy is the frequency of this class, and
    its loss is the entropy of the class frequencies. With several classes per record, both values
    are means over the classes. For regression, the loss is the variance of the labels, and the
    accuracy is 0.
    """
    if result.get("task") == "regress":
        loss, r2 = result["test_loss"], result["test_r2"]
        is_known = loss is not None and r2 is not None and r2 < 1
        return 0.0, float(loss) / (1 - float(r2)) if is_known else 0.0
    per_class = (result.get("metrics") or {}).get("per_class", {})
    counts = [int(row["support"]) for row in per_class.values()]
    if any(count < 0 for count in counts):
        raise ValueError("a class with fewer than no records")
    if result.get("task") == "multilabel":
        each = [count / int(result["test_records"]) for count in counts]
        pairs = [(share, 1 - share) for share in each]
        best = sum(max(pair) for pair in pairs) / len(pairs)
        return best, sum(map(_entropy, pairs)) / len(pairs)
    shares = [count / sum(counts) for count in counts if count]
    return max(shares, default=0.0), _entropy(shares)


def _entropy(shares: Sequence[float]) -> float:
    return -sum(share * math.log(share) for share in shares if share)


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome of an ended run from the files in its folder.

    Return None if the run must be repeated: it has not ended, was made by other versions of the
    software, or has damaged files.
    """
    try:
        result = read_result(folder)
        if result["state"] not in ("finished", "stopped") or result["versions"] != versions():
            return None
        rows = read_rows(folder / METRICS)
        # A crash may cut the last line short, so that it is not read. The last round is then
        # missing, and the study repeats the run.
        if rows[-1]["round"] != result["rounds"]:
            return None
        measure = measure_of(str(result.get("task")))
        diverged = bool(result.get("diverged", False))
        if measure is R2 and result["test_r2"] is None:
            if result["test_loss"] is not None:
                return Outcome(failed=NO_R2)
            # If the loss is infinite or NaN, the file has neither R2 nor loss.
            diverged = True
        scored = [row for row in rows if row.get(measure.key) is not None]
        curve = tuple((int(row["round"]), float(row[measure.key])) for row in scored)
        loss = scored[-1]["loss"]
        last = 0.0 if diverged else curve[-1][1]
        found = Outcome(
            accuracy=last if measure is ACCURACY else None,
            loss=math.inf if diverged or loss is None else float(loss),
            r2=last if measure is R2 and not diverged else None,
            other={} if diverged else _other_scores(result),
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


def _other_scores(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the further finite scores that a table shows for this task, such as macro_f1."""
    metrics = result.get("metrics") or {}
    names = OTHER_SCORES.get(str(result.get("task")), ())
    found = {name: float(metrics[name]) for name in names if metrics.get(name) is not None}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _plausible(found: Outcome) -> bool:
    """Return True if all values are possible.

    An impossible value, such as an accuracy above 1, shows that a file is damaged. The study then
    repeats the run.
    """
    figures = [value for value in found.epsilon.values() if value is not None]
    counts = list((found.traffic or {}).values())
    lowest = 0.0 if found.accuracy is not None else -math.inf
    return (
        all(lowest <= score <= 1 for _, score in found.curve)
        and not math.isnan(found.loss)
        and found.records >= 1
        and isinstance(found.guarantee, str)
        and found.guarantee.isprintable()
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in figures)
        and all(type(count) is int for count in counts)
    )


def clear(folder: Path) -> None:
    """Delete the folder of an interrupted run, if it exists.

    No result is lost: the run is a seeded simulation, which can be repeated exactly.
    """
    for pause_s in (0.2, 1.0, 5.0):
        if not folder.exists():
            return
        try:
            shutil.rmtree(folder)
        except OSError:
            # A worker process of a killed study may still be writing files. Wait, and try again.
            time.sleep(pause_s)
    if folder.exists():
        raise DpfedError(
            f"{folder} cannot be removed to make room for a run: check its permissions"
        )


def cost_of(config: Config) -> float:
    """Return a value proportional to the number of per-record gradients that a run computes."""
    run = config.run
    uses = config.algorithm.releases
    batch = config.privacy.batch or (config.privacy.rate or 0) * 1000
    share = run.participation * config.data.clients
    per_step = run.max_records_per_step if batch == "auto" else share * batch
    return float(run.rounds * run.local_steps * per_step * uses.batches * uses.releases)

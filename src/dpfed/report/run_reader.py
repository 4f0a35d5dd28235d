"""Read the files of runs for a report page. For a public page, private values are left out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.report.labels import ALIKE, labels
from dpfed.report.statement.build import Statement, statement_of
from dpfed.training.budget.recorded_spending import is_run, read_recorded_spending
from dpfed.training.budget.release import NO_PRIVACY
from dpfed.training.callbacks.diagnostics import read_diagnostics
from dpfed.training.callbacks.public_figures import (
    FIGURES,
    flat,
    public_result,
    public_row,
    public_settings,
)
from dpfed.training.run_folder.files import (
    CONFIG,
    LABEL_COUNTS,
    METRICS,
    read_object,
    read_result,
    read_rows,
    read_settings,
)

# Number of rounds, logarithmically spaced, at which an epsilon curve is computed. More rounds would
# take too long, because the accountant computes each epsilon anew.
POINTS = 12
STUDY_FILE = "study.json"


@dataclass(frozen=True)
class RunData:
    """The contents of one run's files, for a report page.

    name          name of the folder, empty on a public page
    settings      the configuration, as a dict by section
    result        the result of the run, empty if there is none yet
    rows          the metrics of each completed round
    diagnostics   the recorded diagnostics of rounds
    label_counts  class names and, for each client, the number of records of each class;
                  None if they were not recorded
    """

    name: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    label_counts: Mapping[str, Any] | None = None

    def curve(self, key: str, diagnostics: bool = False) -> dict[int, float]:
        """Return the values of one metric over the rounds, as a dict from round to value.

        key          name of the value
        diagnostics  True to read it from the diagnostics, False to read it from the metrics
        """
        rows = self.diagnostics if diagnostics else self.rows
        found = {int(row["round"]): number(row.get(key)) for row in rows}
        return {t: value for t, value in found.items() if value is not None}

    @property
    def last(self) -> int:
        """Number of the last round that is completed."""
        return max((int(row["round"]) for row in self.rows), default=0)

    @property
    def planned_rounds(self) -> int:
        return int(number(self.settings.get("run", {}).get("rounds")) or 0)

    @property
    def running(self) -> bool:
        return self.result.get("state") == "running"

    @property
    def unfinished(self) -> bool:
        """True if rounds remain; then a part of the run's planned epsilon is not spent yet."""
        ended = self.result.get("state") in ("finished", "stopped")
        return not ended and self.last < self.planned_rounds

    @property
    def diverged(self) -> bool:
        return bool(self.result.get("diverged", False))

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the last scored round; 0 if the run diverged, None if nothing was scored."""
        if self.diverged:
            return 0.0
        scored = self.curve("accuracy")
        return scored[max(scored)] if scored else None


@dataclass(frozen=True)
class Privacy:
    """The privacy spending of the first run of a group, from the run's ledger.

    planned       the privacy plan; if repeated rounds were charged, with this larger number
    server_worst  epsilon against the server, of the client with the most rounds
    third_party   epsilon against a third party, who sees only the global models
    seeded        True if the noise was drawn from a seed
    void          the reason why the third party's epsilon does not hold, or None
    statement     the privacy statement of the run
    epsilons      epsilon of each client, empty on a public page
    """

    planned: Planned
    server_worst: float
    third_party: float
    seeded: bool
    void: str | None
    statement: Statement
    epsilons: tuple[float, ...] = ()

    @property
    def advantage(self) -> float:
        """Largest possible advantage of an attacker who guesses if a record was used in training.

        The advantage is the rate of hits minus the rate of false alarms. It holds for the records
        of the client with the most rounds.
        """
        return _advantage(self.planned)

    def over_rounds(self) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """Return (rounds, epsilons against the server, epsilons against a third party).

        The third party sees only the global models. The epsilons are planned ones, one after each
        round. If the third party's epsilon does not hold, it is replaced by the server's.
        """
        at, server, third = over_rounds(self.planned)
        return at, server, server if self.void else third


@dataclass(frozen=True)
class Group:
    """Runs of one method that differ only in their seed, or in other settings listed in ALIKE.

    label    label of the method on the page
    privacy  spending of the first run; None without privacy or without a readable ledger
    trouble  the reason why the ledger could not be read, or None
    """

    label: str
    runs: tuple[RunData, ...]
    privacy: Privacy | None = None
    trouble: str | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.runs[0].settings

    @property
    def accuracies(self) -> tuple[float, ...]:
        return tuple(run.accuracy for run in self.runs if run.accuracy is not None)

    @property
    def scores(self) -> tuple[float, ...]:
        """The last measured accuracy of each run; R2 for regression, which has no accuracy."""
        last = [curve[max(curve)] for run in self.runs if (curve := run.curve("r2"))]
        return tuple(last) or self.accuracies

    @property
    def epsilon(self) -> dict[str, float | None]:
        """Planned epsilon by observer: "server_worst" and "third_party", as in the class Privacy.

        It is the largest value in the results of the runs. Without a value there, it is the epsilon
        from the ledger.
        """
        return {view: self._epsilon(view) for view in FIGURES}

    def _epsilon(self, view: str) -> float | None:
        found = [number((run.result.get("epsilon") or {}).get(view)) for run in self.runs]
        from_ledger = getattr(self.privacy, view, None)
        return max((value for value in found if value is not None), default=from_ledger)

    @property
    def unfinished(self) -> RunData | None:
        """The unfinished run with the most completed rounds, None if all runs have ended."""
        unfinished = [run for run in self.runs if run.unfinished]
        return max(unfinished, key=lambda run: run.last, default=None)

    @property
    def spent(self) -> float | None:
        """Epsilon against the server that the unfinished run has spent; None without such a run.

        On a public page, it is the planned epsilon after the same number of rounds.
        """
        run = self.unfinished
        if run is None or self.privacy is None:
            return None
        by_round = run.curve("epsilon_server_max")
        if by_round:
            return by_round[max(by_round)]
        return _planned_after(self.privacy.planned, run.last)

    def first(self, key: str) -> Any:
        """Return the value of `key` in the first result with this key; None if no result has it."""
        return next((run.result[key] for run in self.runs if run.result.get(key) is not None), None)

    def bands(self, key: str, diagnostics: bool = False) -> tuple[list[int], np.ndarray]:
        """Return the rounds of a measured value, and the value of each seed, `[seeds, rounds]`.

        A run that ended earlier than another one is left out. The rounds are those in which all
        other runs have a value.

        key, diagnostics  as in `RunData.curve`
        """
        curves = [curve for run in self.runs if (curve := run.curve(key, diagnostics))]
        last = max((max(curve) for curve in curves), default=0)
        full = [curve for curve in curves if max(curve) == last]
        rounds = sorted(set.intersection(*map(set, full))) if full else []
        return rounds, np.array([[curve[t] for t in rounds] for curve in full])


def number(value: Any) -> float | None:
    """Return a finite number as a float. Return None for all other values of damaged files."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@lru_cache(maxsize=64)
def over_rounds(planned: Planned) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Return (rounds, epsilons against the server, epsilons against a third party), as planned.

    The third party sees only the global models. The rounds are those that `rounds_shown` selects,
    and each has two epsilons.
    """
    at = rounds_shown(planned.rounds)
    return (
        at,
        tuple(planned.server_after(t) for t in at),
        tuple(planned.third_party_after(t) for t in at),
    )


def rounds_shown(rounds: int) -> tuple[int, ...]:
    """Return the rounds at which an epsilon curve is computed: most are early, where it bends."""
    early = {round(rounds ** (i / (POINTS - 1))) for i in range(POINTS)}
    return tuple(sorted(early | {max(1, round(rounds * i / 6)) for i in range(1, 7)}))


@lru_cache(maxsize=64)
def _planned_after(planned: Planned, rounds: int) -> float:
    if rounds == 0 and not planned.prior:
        return 0.0
    return planned.server_after(rounds)


@lru_cache(maxsize=64)
def _advantage(planned: Planned) -> float:
    return planned.meaning()["membership_advantage"]


def read_run_data(path: Path, public: bool) -> RunData:
    """Return the contents of a run's files. A missing file counts as an empty file.

    public  True to leave out values that a published page must not show
    """
    settings = _settings(path)
    result = read_result(path)
    rows = tuple(read_rows(path / METRICS))
    if public:
        public_rows = tuple(map(public_row, rows))
        return RunData("", public_settings(settings), public_result(result), public_rows)
    name = path.resolve().name
    return RunData(name, settings, result, rows, tuple(read_diagnostics(path)), _label_counts(path))


def _settings(path: Path) -> dict[str, Any]:
    settings = read_settings(path)
    if settings is None:
        raise DpfedError(f"{path / CONFIG} cannot be read: give the folder of a run or of a study")
    return settings


def _label_counts(path: Path) -> dict[str, Any] | None:
    """Return the class names and each client's record counts by class, read from a file.

    Return None if the file is missing or damaged.
    """
    found = read_object(path / LABEL_COUNTS)
    classes = found.get("classes")
    counts = found.get("labels")
    if not isinstance(classes, list) or not isinstance(counts, list) or not counts:
        return None
    for row in counts:
        if not isinstance(row, list) or len(row) != len(classes):
            return None
        if not all(type(count) is int and count >= 0 for count in row):
            return None
    return {"classes": [str(name) for name in classes], "labels": counts}


def group_of(label: str, paths: Sequence[Path], runs: Sequence[RunData], public: bool) -> Group:
    """Return one group of runs, with the privacy spending of its first run from the ledger.

    If the ledger cannot be read, the group's `trouble` says why.
    """
    if runs[0].result.get("release") == NO_PRIVACY:
        return Group(label, tuple(runs))
    try:
        found = read_recorded_spending(paths[0])
    except DpfedError as error:
        # Use this sentence on a public page in place of the error message, which names a folder.
        hidden = "the ledger could not be read, so this page has no epsilon from it"
        return Group(label, tuple(runs), trouble=hidden if public else str(error))
    epsilons = () if public else tuple(float(value) for value in found.epsilons)
    stated = statement_of(found, runs[0].result, runs[0].settings)
    figures = (found.realised, found.server_worst, found.third_party, found.seeded, found.void)
    return Group(label, tuple(runs), Privacy(*figures, stated, epsilons))


def grouped(paths: Sequence[Path], public: bool) -> list[Group]:
    """Return the runs in groups, one for each method, in the order of `paths`.

    Runs of a group have equal settings, except those listed in ALIKE, such as the seed.
    """
    members: dict[str, list[Path]] = {}
    whole_settings: dict[str, dict[str, Any]] = {}
    for path in paths:
        # Compare all settings, even those that a public page hides. Otherwise runs on different
        # data could form one group.
        settings = flat(_settings(path))
        identity = {key: value for key, value in settings.items() if key not in ALIKE}
        key = json.dumps(identity, sort_keys=True, default=str)
        members.setdefault(key, []).append(path)
        whole_settings.setdefault(key, settings)
    groups = list(members.values())
    data = [[read_run_data(path, public) for path in group] for group in groups]
    names = labels([flat(runs[0].settings) for runs in data], list(whole_settings.values()))
    return [
        group_of(name, group, runs, public)
        for name, group, runs in zip(names, groups, data, strict=True)
    ]


def runs_and_studies(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return two lists: folders of runs, folders of studies. Raise DpfedError for other folders."""
    runs = [path for path in paths if is_run(path)]
    studies = [path for path in paths if path not in runs]
    for path in studies:
        if not (path / STUDY_FILE).is_file():
            raise DpfedError(
                f"{path} is neither the folder of a run nor of a study: "
                "give what `dpfed run` or `dpfed compare` wrote"
            )
    return runs, studies

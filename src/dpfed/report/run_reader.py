"""Runs and studies as a page needs them. For a public page everything private is dropped here, where it is read."""

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
from dpfed.training.budget.recorded_spending import NO_PRIVACY, is_run, read_recorded_spending
from dpfed.training.callbacks.diagnostics import read_diagnostics
from dpfed.training.callbacks.public_figures import flat, public_result, public_row, public_settings
from dpfed.training.run_folder.files import (
    CONFIG,
    LABEL_COUNTS,
    METRICS,
    read_object,
    read_result,
    read_rows,
    read_settings,
)

POINTS = (
    12  # rounds at which epsilon is computed for a curve; a query of the accountant takes a while
)


@dataclass(frozen=True)
class RunData:
    """One run. `name` is its folder's, empty on a public page; holdings: classes and counts of labels by client."""

    name: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    holdings: Mapping[str, Any] | None = None

    def curve(self, key: str) -> dict[int, float]:
        """The rounds at which something was measured, and what."""
        found = {int(row["round"]): number(row.get(key)) for row in self.rows}
        return {t: value for t, value in found.items() if value is not None}

    @property
    def last(self) -> int:
        return max((int(row["round"]) for row in self.rows), default=0)

    @property
    def planned_rounds(self) -> int:
        return int(number(self.settings.get("run", {}).get("rounds")) or 0)

    @property
    def unfinished(self) -> bool:
        """True while rounds are still to come, so that the planned epsilon is not spent yet."""
        ended = self.result.get("state") in ("finished", "stopped")
        return not ended and self.last < self.planned_rounds

    @property
    def diverged(self) -> bool:
        return bool(self.result.get("diverged", False))

    @property
    def accuracy(self) -> float | None:
        """Of the last round that was scored; 0 for a run that diverged, as in comparisons."""
        scored = self.curve("accuracy")
        return 0.0 if self.diverged else scored[max(scored)] if scored else None


@dataclass(frozen=True)
class Privacy:
    """What the ledger of a group's first run says. epsilons: of each client, none on a public page.

    planned  as it came out: where attempts were repeated, more than the plan foresaw
    """

    planned: Planned
    server_worst: float
    third_party: float
    clients: int
    seeded: bool
    void: str | None
    epsilons: tuple[float, ...] = ()

    @property
    def advantage(self) -> float:
        """The largest advantage of anyone who guesses whether a record was used, of a client in every round."""
        return _advantage(self.planned)

    def over_rounds(self) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """(rounds, server, third party) of the plan; where rounds were repeated a third party knows what the server does."""
        at, server, third = _over_rounds(self.planned)
        return at, server, server if self.void else third


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

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
    def epsilon(self) -> dict[str, float | None]:
        """The plan's figures, the largest over seeds; from the ledger while a run has not written its result."""
        out: dict[str, float | None] = {}
        for view in ("server_worst", "third_party"):
            found = [number((run.result.get("epsilon") or {}).get(view)) for run in self.runs]
            known = [value for value in found if value is not None]
            out[view] = (
                max(known) if known else getattr(self.privacy, view) if self.privacy else None
            )
        return out

    @property
    def unfinished(self) -> RunData | None:
        """The run that is furthest among those with rounds still to come."""
        going = [run for run in self.runs if run.unfinished]
        return max(going, key=lambda run: run.last, default=None)

    @property
    def spent(self) -> float | None:
        """Epsilon of the unfinished run so far, server's view; on a public page by the plan."""
        run = self.unfinished
        if run is None or self.privacy is None:
            return None
        by_round = run.curve("epsilon_server_max")
        if by_round:
            return by_round[max(by_round)]
        return _planned_after(self.privacy.planned, run.last)

    def first(self, key: str) -> Any:
        """From the first run that has it in its result."""
        return next((run.result[key] for run in self.runs if run.result.get(key) is not None), None)

    def bands(self, key: str) -> tuple[list[int], np.ndarray]:
        """Rounds, and values `[seeds, rounds]` of the runs that came as far as the furthest."""
        curves = [curve for run in self.runs if (curve := run.curve(key))]
        last = max((max(curve) for curve in curves), default=0)
        full = [curve for curve in curves if max(curve) == last]
        rounds = sorted(set.intersection(*(set(curve) for curve in full))) if full else []
        return rounds, np.array([[curve[t] for t in rounds] for curve in full])


def number(value: Any) -> float | None:
    """A finite number as it is, anything else as None: files may be damaged."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@lru_cache(maxsize=64)
def _over_rounds(planned: Planned) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    at = rounds_shown(planned.rounds)
    return at, tuple(planned.server(t) for t in at), tuple(planned.third_party_after(t) for t in at)


def rounds_shown(rounds: int) -> tuple[int, ...]:
    """Some rounds, closer at the beginning, where epsilon bends most: a line between two points lies below the curve."""
    few = max(1, POINTS - 1)
    early = {round(rounds ** (i / few)) for i in range(POINTS)}
    return tuple(sorted(early | {max(1, round(rounds * i / 6)) for i in range(1, 7)}))


@lru_cache(maxsize=64)
def _planned_after(planned: Planned, rounds: int) -> float:
    if rounds == 0 and not planned.prior:
        return 0.0
    return planned.server(rounds)


@lru_cache(maxsize=64)
def _advantage(planned: Planned) -> float:
    return planned.meaning()["membership_advantage"]


def read_run_data(path: Path, public: bool) -> RunData:
    """Whatever of a run is there; one that is going on has no result yet."""
    settings = read_settings(path)
    if settings is None:
        raise DpfedError(f"{path / CONFIG} cannot be read: give the folder of a run or of a study")
    result = read_result(path)
    rows = tuple(read_rows(path / METRICS))
    if public:
        kept = tuple(public_row(row) for row in rows)
        return RunData("", public_settings(settings), public_result(result), kept)
    name = path.resolve().name
    return RunData(name, settings, result, rows, tuple(read_diagnostics(path)), _holdings(path))


def _holdings(path: Path) -> dict[str, Any] | None:
    found = read_object(path / LABEL_COUNTS)
    classes, labels = found.get("classes"), found.get("labels")
    if not isinstance(classes, list) or not isinstance(labels, list):
        return None
    right = all(
        isinstance(row, list) and len(row) == len(classes) and all(map(_count, row))
        for row in labels
    )
    return (
        {"classes": [str(name) for name in classes], "labels": labels} if right and labels else None
    )


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def privacy_of(path: Path, data: RunData, public: bool) -> tuple[Privacy | None, str | None]:
    """What the ledger says, or why it says nothing."""
    if data.result.get("release") == NO_PRIVACY:
        return None, None
    try:
        found = read_recorded_spending(path)
    except DpfedError as error:
        if public:  # the sentence names a folder
            return None, "the ledger could not be read, so this page has no epsilon from it"
        return None, str(error)
    each = () if public else tuple(float(value) for value in found.epsilons)
    return Privacy(
        found.realised,
        found.server_worst,
        found.third_party,
        found.clients,
        found.seeded,
        found.void,
        each,
    ), None


def grouped(paths: Sequence[Path], public: bool) -> list[Group]:
    """Runs by what they are, in the order they were given."""
    alike: dict[str, list[tuple[Path, RunData]]] = {}
    wholes: dict[str, dict[str, Any]] = {}
    for path in paths:
        data = read_run_data(path, public)
        # What is hidden still tells runs apart: the same settings on other data are another method's row.
        whole = flat(read_settings(path) or {})
        key = json.dumps(
            {k: v for k, v in whole.items() if k not in ALIKE}, sort_keys=True, default=str
        )
        alike.setdefault(key, []).append((path, data))
        wholes.setdefault(key, whole)
    members = list(alike.values())
    names = labels([flat(group[0][1].settings) for group in members], list(wholes.values()))
    out = []
    for name, group in zip(names, members, strict=True):
        path, data = group[0]
        out.append(Group(name, tuple(run for _, run in group), *privacy_of(path, data, public)))
    return out


def runs_and_studies(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Which folders are runs and which are studies; anything else is refused."""
    runs, studies = [], []
    for path in paths:
        if is_run(path):
            runs.append(path)
        elif (path / "study.json").is_file():
            studies.append(path)
        else:
            raise DpfedError(
                f"{path} is neither the folder of a run nor of a study: give what `dpfed run` or `dpfed compare` wrote"
            )
    return runs, studies

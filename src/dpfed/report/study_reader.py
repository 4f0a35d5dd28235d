"""A study's folder as a page needs it: its table, and the reported runs behind each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.privacy.published import show_loss
from dpfed.registry import registry
from dpfed.report.run_reader import Group, number, privacy_of, read_run_data
from dpfed.studies.arms import Arm
from dpfed.studies.study import RUNS, STUDY, Study, make_task
from dpfed.studies.tables import Row
from dpfed.training.budget.recorded_spending import is_run
from dpfed.training.callbacks.public_figures import FIGURES


@dataclass(frozen=True)
class Entry:
    """A row of a table with what the page says of it; difference: mean and half width, as they were computed."""

    row: Row
    difference: tuple[float, float | None] | None = None


@dataclass(frozen=True)
class Listing:
    """A table of the page. axis: what the columns of a grid are."""

    title: str
    entries: tuple[Entry, ...]
    axis: str = ""
    reference: str | None = None
    notes: tuple[str, ...] = ()


def read_study(folder: Path, public: bool) -> tuple[Listing, list[Group]]:
    """The table as `dpfed compare` wrote it and one group of runs for each row whose runs are still there."""
    try:
        table = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        listing = Listing(
            title=str(table["title"]),
            entries=tuple(_entry(record, public) for record in table["rows"]),
            axis=str(table["axis"]),
            reference=table["reference"],
            notes=() if public else tuple(str(note) for note in table["notes"]),  # they name seeds
        )
    except FileNotFoundError:
        raise DpfedError(
            f"{folder} has no table yet: let `dpfed compare` finish, then report it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DpfedError(
            f"{folder / 'table.json'} is damaged: the same `dpfed compare` writes it again"
        ) from None
    return listing, _groups(folder, listing, public)


def _entry(record: Mapping[str, Any], public: bool) -> Entry:
    traffic = record.get("traffic")
    row = Row(
        label=str(record["method"]),
        row=str(record["row"]),
        column=str(record["column"]),
        rates={str(key): float(value) for key, value in record["rates"].items()},
        tuning_runs=int(record["tuning_runs"]),
        at_edge=bool(record["at_edge"]),
        accuracies=tuple(float(value) for value in record["accuracies"]),
        diverged=int(record["diverged"]),
        epsilon={view: number(record["epsilon"].get(view)) for view in FIGURES},
        guarantee=str(record["guarantee"]),
        traffic={str(k): int(v) for k, v in traffic.items()} if traffic else None,
        failed=record["failed"]
        and ("see the operator's page" if public else str(record["failed"])),
    )
    mean, interval = number(record["difference"]), record["interval"]
    half = (float(interval[1]) - float(interval[0])) / 2 if interval else None
    return Entry(row, None if mean is None else (mean, half))


def _groups(folder: Path, listing: Listing, public: bool) -> list[Group]:
    study = _study(folder)
    if study is None or len(study.arms) != len(listing.entries):
        return []
    known, out = registry(), []
    for i, (arm, entry) in enumerate(zip(study.arms, listing.entries, strict=True)):
        if entry.row.failed or set(entry.row.rates) != set(arm.grids):
            continue
        point = tuple(entry.row.rates[key] for key in arm.grids)
        try:
            keys = [make_task(study, i, point, seed, known).key for seed in range(study.seeds)]
        except DpfedError:  # made by a version with other settings: the table stands by itself
            continue
        paths = [folder / RUNS / key for key in keys if is_run(folder / RUNS / key)]
        if paths:
            runs = tuple(read_run_data(path, public) for path in paths)
            out.append(Group(arm.label, runs, *privacy_of(paths[0], runs[0], public)))
    return out


def _study(folder: Path) -> Study | None:
    try:
        asked = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        arms = tuple(Arm(**_known(Arm, _tuples(arm))) for arm in asked.pop("arms"))
        return Study(arms=arms, **_known(Study, asked))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _known(cls: type[Any], table: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in table.items() if key in names}


def _tuples(arm: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where an arm has tuples."""
    grids = {key: tuple(values) for key, values in arm["grids"].items()}
    return {**arm, "overrides": tuple(arm["overrides"]), "grids": grids}


def listing_of(groups: list[Group]) -> Listing:
    """The table of runs that were given one by one: nothing is known of how their rates were chosen."""
    entries = []
    for group in groups:
        traffic = group.first("traffic")
        row = Row(
            label=group.label,
            accuracies=group.accuracies,
            diverged=sum(run.diverged for run in group.runs),
            epsilon=group.epsilon,
            traffic=traffic if isinstance(traffic, dict) else None,
        )
        entries.append(Entry(row))
    note = "accuracy: mean ± standard deviation over the runs of each method, on the server's public test set"
    notes = [note]
    for group in groups:
        run = group.unfinished
        if run is not None and group.spent is not None:
            so_far = f"{show_loss(group.spent, 2)} is spent after round {run.last} of {run.planned_rounds}"
            notes.append(f"{group.label}: epsilon in the table is the planned one; {so_far}")
    return Listing("Runs side by side", tuple(entries), notes=tuple(notes))

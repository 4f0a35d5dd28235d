"""Read the folder of a study for an HTML page: the table, and the reported runs of each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.report.measures import ACCURACY, MEASURES, Measure
from dpfed.report.run_reader import Group, group_of, number, read_run_data
from dpfed.report.tables import Row, Table
from dpfed.studies.arms import Arm
from dpfed.studies.outcomes import DAMAGED
from dpfed.studies.study import RUNS, STUDY, Study, make_task
from dpfed.training.budget.recorded_spending import is_run
from dpfed.training.callbacks.public_figures import FIGURES


def read_study(folder: Path, public: bool) -> tuple[Table, list[Group]]:
    """Return the table of a study, and the data of the runs of each row.

    Rows whose run folders no longer exist have no run data.

    public  True to leave out values that a published page must not show
    """
    try:
        found = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        measure = MEASURES[found.get("measure", ACCURACY.key)]
        table = Table(
            title=str(found["title"]),
            axis=str(found["axis"]),
            rows=tuple(_row(record, measure, public) for record in found["rows"]),
            reference=found["reference"],
            # The notes contain seeds, from which anybody could compute which clients took part in a
            # round. A public page must not show them.
            notes=() if public else tuple(map(str, found["notes"])),
            measure=measure,
        )
    except FileNotFoundError:
        raise DpfedError(
            f"{folder} has no table yet: let `dpfed compare` finish, then report it"
        ) from None
    except DAMAGED:
        raise DpfedError(
            f"{folder / 'table.json'} is damaged: the same `dpfed compare` writes it again"
        ) from None
    return table, _groups(folder, table, public)


def _row(record: Mapping[str, Any], measure: Measure, public: bool) -> Row:
    mean = number(record["difference"])
    interval = record["interval"]
    half = (float(interval[1]) - float(interval[0])) / 2 if interval else None
    failed = record["failed"] and str(record["failed"])
    traffic = record.get("traffic") or {}
    return Row(
        label=str(record["method"]),
        row=str(record["row"]),
        column=str(record["column"]),
        rates={str(key): float(value) for key, value in record["rates"].items()},
        tuning_runs=int(record["tuning_runs"]),
        at_edge=bool(record["at_edge"]),
        scores=tuple(float(value) for value in record[measure.values]),
        other={str(key): number(value) for key, value in record.get("other", {}).items()},
        diverged=int(record["diverged"]),
        difference=None if mean is None else (mean, half),
        epsilon={view: number(record["epsilon"].get(view)) for view in FIGURES},
        guarantee=str(record["guarantee"]),
        traffic={str(key): int(count) for key, count in traffic.items()} or None,
        failed="see the operator's page" if failed and public else failed,
    )


def _groups(folder: Path, table: Table, public: bool) -> list[Group]:
    study = read_asked(folder)
    if study is None or len(study.arms) != len(table.rows):
        return []
    out = []
    for i, (arm, row) in enumerate(zip(study.arms, table.rows, strict=True)):
        if row.failed or set(row.rates) != set(arm.grids):
            continue
        point = tuple(row.rates[key] for key in arm.grids)
        try:
            tasks = [make_task(study, i, point, seed, registry()) for seed in range(study.seeds)]
        except DpfedError:
            # A version of dpfed with other settings made the study, so the names of its run folders
            # are unknown. Show only the table.
            continue
        paths = [folder / RUNS / task.key for task in tasks if is_run(folder / RUNS / task.key)]
        if paths:
            runs = [read_run_data(path, public) for path in paths]
            out.append(group_of(arm.label, paths, runs, public))
    return out


def read_asked(folder: Path) -> Study | None:
    """Return the study from the description file in `folder`; None if the file is damaged."""
    try:
        asked = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        arms = tuple(_arm(arm) for arm in asked.pop("arms"))
        return Study(arms=arms, **_known(Study, asked))
    except DAMAGED:
        return None


def _arm(table: Mapping[str, Any]) -> Arm:
    """Return an arm (method with its settings) from its JSON form, which has lists, not tuples."""
    grids = {key: tuple(values) for key, values in table["grids"].items()}
    known = _known(Arm, table)
    return Arm(**{**known, "overrides": tuple(table["overrides"]), "grids": grids})


def _known(cls: type[Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `table` whose names are fields of the dataclass `cls`."""
    names = {field.name for field in fields(cls)}
    return {key: value for key, value in table.items() if key in names}

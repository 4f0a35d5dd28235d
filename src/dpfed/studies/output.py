"""What a study leaves in its folder: the table in four formats, the curves, every run of the search."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.studies.arms import REFERENCE
from dpfed.studies.plots import Curve, accuracy_over_rounds
from dpfed.studies.study import ArmResult, Study
from dpfed.studies.tables import Row, Table, to_csv, to_json, to_latex, to_markdown

FILES = (
    "table.csv",
    "table.json",
    "table.md",
    "table.tex",
    "curves.png",
    "curves.svg",
    "search.csv",
)


def table_of(study: Study, results: Sequence[ArmResult]) -> Table:
    done = {r.arm.label: r for r in results if r.failed is None}
    references = {r.arm.reference for r in results if r.arm.reference in done}
    name = next(iter(references)) if len(references) == 1 else REFERENCE if references else None
    rows = tuple(_row(result, done, study.search_seeds) for result in results)
    return Table(study.title, study.axis, rows, name, tuple(_notes(study, rows)))


def _row(result: ArmResult, done: Mapping[str, ArmResult], search_seeds: int) -> Row:
    arm, reported = result.arm, result.reported
    against = done.get(arm.reference or "")
    first = reported[0] if reported else None
    return Row(
        label=arm.label,
        row=arm.row or arm.label,
        column=arm.column,
        rates=dict(zip(arm.grids, result.point, strict=True)) if result.point else {},
        tuning_runs=search_seeds * len(result.tuned),
        at_edge=result.at_edge,
        accuracies=tuple(outcome.accuracy for outcome in reported),
        diverged=sum(outcome.diverged for outcome in reported),
        reference=None
        if against is None or against is result
        else tuple(o.accuracy for o in against.reported),
        epsilon=_largest([outcome.epsilon for outcome in reported]),
        guarantee=first.guarantee if first else "",
        traffic=first.traffic if first else None,
        failed=result.failed,
    )


def _largest(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Over seeds: with unequal clients the split, and so epsilon, differs a little between them."""
    out: dict[str, float | None] = {}
    for view in ("server_worst", "third_party"):
        values = [v for figure in figures if (v := figure.get(view)) is not None]
        out[view] = max(values, default=None)
    return out


def _notes(study: Study, rows: Sequence[Row]) -> list[str]:
    first = int(study.base["run"]["seed"])
    seeds = f"seeds {first} to {first + study.seeds - 1}" if study.seeds > 1 else f"seed {first}"
    others = (
        "another seed"
        if study.search_seeds == 1
        else f"the mean of {study.search_seeds} other seeds"
    )
    notes = [
        f"accuracy: mean ± standard deviation over {seeds} on the test half of the server's public data; "
        f"rates were chosen on the other half with {others}, by the same number of runs for every method (by accuracy, "
        "and by loss where accuracies differ by less than one standard error)",
        "difference: paired over seeds, in points of accuracy, with its 95 % t interval",
    ]
    private = [row for row in rows if row.epsilon.get("server_worst") is not None]
    if private:
        notes.append(
            "epsilon excludes tuning: it is that of one run, for a client in every round (server) and for those who see only "
            "global models (third party)"
        )
        said: dict[str, list[str]] = {}
        for row in private:
            said.setdefault(row.guarantee, []).append(row.label)
        alike = len(said) == 1 and len(private) == len(rows)
        notes += [f"{'all' if alike else ', '.join(names)}: {text}" for text, names in said.items()]
        notes.append("noise was seeded: simulations, not for release")
    if any(row.traffic for row in rows):
        notes.append("up, down: numbers (bytes) that one client sends and receives in a round")
    return notes


def curves_of(results: Sequence[ArmResult], axis: str) -> list[Curve]:
    """Runs that stopped early have no curve of full length and are left out of the band."""
    out = []
    for result in results:
        full = max((len(o.curve) for o in result.reported), default=0)
        lines = [o.curve for o in result.reported if len(o.curve) == full]
        if full:
            panel = f"{axis} {result.arm.column}" if axis else ""
            name = result.arm.row or result.arm.label
            seeds = tuple(tuple(accuracy for _, accuracy in line) for line in lines)
            out.append(Curve(name, panel, tuple(t for t, _ in lines[0]), seeds))
    return out


def search_csv(results: Sequence[ArmResult]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = list(dict.fromkeys(key for result in results for key in result.arm.grids))
    writer.writerow(["method", *keys, "validation_accuracy", "validation_loss", "chosen"])
    for result in results:
        for point, score in sorted(result.tuned.items()):
            rates: dict[str, Any] = dict(zip(result.arm.grids, point, strict=True))
            chosen = "yes" if point == result.point else ""
            writer.writerow(
                [
                    result.arm.label,
                    *(rates.get(key, "") for key in keys),
                    score.accuracy,
                    score.loss,
                    chosen,
                ]
            )
    return out.getvalue()


def write(study: Study, results: Sequence[ArmResult], out: Path) -> Table:
    table = table_of(study, results)
    texts = (to_csv(table), to_json(table), to_markdown(table), to_latex(table))
    try:
        for name, text in zip(FILES, texts, strict=False):
            (out / name).write_text(text, encoding="utf-8")
        (out / FILES[6]).write_text(search_csv(results), encoding="utf-8")
        curves = curves_of(results, study.axis if len({r.arm.row for r in results}) > 1 else "")
        if curves:
            accuracy_over_rounds(curves, study.title, [out / FILES[4], out / FILES[5]])
    except OSError as error:
        raise DpfedError(
            f"the tables in {out} cannot be written: {error.strerror or error}"
        ) from None
    return table

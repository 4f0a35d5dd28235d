"""Write the files of a finished study.

These are the table of results in four formats, plots of the score over rounds, and the scores of
the search for learning rates.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpfed.errors import DpfedError
from dpfed.report.figures.plots import Curve, scores_over_rounds
from dpfed.report.measures import ACCURACY, Measure
from dpfed.report.table_files import to_csv, to_json, to_latex, to_markdown
from dpfed.report.tables import Row, Table, paired
from dpfed.studies.arms import REFERENCE
from dpfed.studies.search import Score
from dpfed.studies.study import ArmResult, Study
from dpfed.training.callbacks.public_figures import FIGURES

TABLES = {
    "table.csv": to_csv,
    "table.json": to_json,
    "table.md": to_markdown,
    "table.tex": to_latex,
}
CHOSEN_BY = {
    "accuracy": "by accuracy, and by loss where accuracies differ by less than one standard error",
    "r2": "by loss",
}
CURVES = ("curves.png", "curves.svg")
SEARCH = "search.csv"
FILES = (*TABLES, *CURVES, SEARCH)


def table_of(study: Study, results: Sequence[ArmResult]) -> Table:
    done = {result.arm.label: result for result in results if result.failed is None}
    references = {result.arm.reference for result in results if result.arm.reference in done}
    reference = REFERENCE if references else None
    if len(references) == 1:
        (reference,) = references
    rows = tuple(_row(result, done, study) for result in results)
    notes = tuple(_notes(study, rows))
    return Table(study.title, study.axis, rows, reference, notes, study.measure)


def _row(result: ArmResult, done: Mapping[str, ArmResult], study: Study) -> Row:
    arm = result.arm
    reported = result.reported
    scores = _scores(result, study.measure)
    reference = done.get(arm.reference or "")
    difference = None
    if reference is not None and reference is not result:
        theirs = _scores(reference, study.measure)
        difference = paired(scores, theirs) if scores and theirs else None
    return Row(
        label=arm.label,
        row=arm.row or arm.label,
        column=arm.column,
        rates=dict(zip(arm.grids, result.point, strict=True)) if result.point else {},
        tuning_runs=study.search_seeds * len(result.tuned),
        at_edge=result.at_edge,
        scores=scores,
        other=_other_means(result),
        diverged=sum(outcome.diverged for outcome in reported),
        difference=difference,
        epsilon={view: _largest_epsilon(result, view) for view in FIGURES},
        guarantee=reported[0].guarantee if reported else "",
        traffic=reported[0].traffic if reported else None,
        failed=result.failed,
    )


def _scores(result: ArmResult, measure: Measure) -> tuple[float, ...]:
    """Return the scores of one method's runs, one per seed; () if a diverged run has no score."""
    found = [outcome.main(measure) for outcome in result.reported]
    scores = tuple(score for score in found if score is not None)
    return scores if len(scores) == len(found) else ()


def _other_means(result: ArmResult) -> dict[str, float | None]:
    """Return, by name, the mean of each further score over the seeds; None if a run lacks it."""
    reported = result.reported
    names = dict.fromkeys(name for outcome in reported for name in outcome.other)
    out: dict[str, float | None] = {}
    for name in names:
        values = [outcome.other[name] for outcome in reported if name in outcome.other]
        out[name] = sum(values) / len(values) if len(values) == len(reported) else None
    return out


def _largest_epsilon(result: ArmResult, view: str) -> float | None:
    """Return the largest epsilon of one method's runs against an observer; None without privacy.

    The epsilons can differ, because each seed gives the clients other numbers of records.

    view  name of the observer, such as "third_party"
    """
    found = [outcome.epsilon.get(view) for outcome in result.reported]
    return max((epsilon for epsilon in found if epsilon is not None), default=None)


def _notes(study: Study, rows: Sequence[Row]) -> list[str]:
    first = int(study.base["run"]["seed"])
    seeds = f"seeds {first} to {first + study.seeds - 1}" if study.seeds > 1 else f"seed {first}"
    others = "another seed"
    if study.search_seeds > 1:
        others = f"the mean of {study.search_seeds} other seeds"
    chosen_by = CHOSEN_BY[study.measure.key]
    points = f"points of {study.measure.name}" if study.measure is ACCURACY else study.measure.name
    notes = [
        f"{study.measure.name}: mean ± standard deviation over {seeds} on the test half of the "
        f"server's public data; rates were chosen on the other half with {others}, by the same "
        f"number of runs for every method ({chosen_by})",
        f"difference: paired over seeds, in {points}, with its 95 % t interval",
    ]
    other = dict.fromkeys(name for row in rows for name in row.other)
    if other:
        notes.append(f"{', '.join(other)}: means over the seeds on the test half")
    notes += _privacy_notes(rows)
    if any(row.traffic for row in rows):
        notes.append("up, down: numbers (bytes) that one client sends and receives in a round")
    return notes


def _privacy_notes(rows: Sequence[Row]) -> list[str]:
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.private:
            labels.setdefault(row.guarantee, []).append(row.label)
    if not labels:
        return []
    names = {guarantee: ", ".join(mine) for guarantee, mine in labels.items()}
    if len(labels) == 1 and all(row.private for row in rows):
        names = dict.fromkeys(labels, "all")
    uncapped = not any("each client in at most" in guarantee for guarantee in labels)
    most = "every round" if uncapped else "the most rounds it may take"
    return [
        f"epsilon excludes tuning: it is that of one run, for a client in {most} (server) and "
        "for those who see only global models (third party)",
        *(f"{name}: {guarantee}" for guarantee, name in names.items()),
        "noise was seeded: simulations, not for release",
    ]


def failures(results: Sequence[ArmResult]) -> list[str]:
    """Return a line of text for each method that failed: its label, and the reason."""
    return [f"{result.arm.label}: {result.failed}" for result in results if result.failed]


def curves_of(results: Sequence[ArmResult], axis: str) -> list[Curve]:
    """Return, for each method, its scores over the rounds, without runs that stopped early.

    axis  setting that varies over the columns of the table; the plot then has one panel for each
          column. "" for a single panel
    """
    out = []
    for result in results:
        full = max((len(outcome.curve) for outcome in result.reported), default=0)
        lines = [outcome.curve for outcome in result.reported if len(outcome.curve) == full]
        if full:
            panel = f"{axis} {result.arm.column}" if axis else ""
            rounds = tuple(t for t, _ in lines[0])
            seeds = tuple(tuple(score for _, score in line) for line in lines)
            out.append(Curve(result.arm.row or result.arm.label, panel, rounds, seeds))
    return out


def search_csv(results: Sequence[ArmResult], measure: Measure = ACCURACY) -> str:
    out = io.StringIO()
    keys = list(dict.fromkeys(key for result in results for key in result.arm.grids))
    head = ["method", *keys, f"validation_{measure.key}", "validation_loss", "chosen"]
    writer = csv.DictWriter(out, head, restval="", lineterminator="\n")
    writer.writeheader()
    for result in results:
        for point, score in sorted(result.tuned.items()):
            line: dict[str, object] = {
                "method": result.arm.label,
                f"validation_{measure.key}": _validation_score(score),
                "validation_loss": score.loss,
                "chosen": "yes" if point == result.point else "",
            }
            writer.writerow(line | dict(zip(result.arm.grids, point, strict=True)))
    return out.getvalue()


def _validation_score(score: Score) -> float | str:
    """Return the accuracy, or R2 for regression, of a score of the search; "" if R2 is unknown."""
    if score.accuracy is not None:
        return score.accuracy
    return 1 - score.loss / score.blind_loss if score.blind_loss else ""


def write(study: Study, results: Sequence[ArmResult], out: Path) -> Table:
    """Write all files of a study into the folder `out`, and return the table of results."""
    table = table_of(study, results)
    several_rows = len({result.arm.row for result in results}) > 1
    curves = curves_of(results, study.axis if several_rows else "")
    try:
        for name, text_of in TABLES.items():
            (out / name).write_text(text_of(table), encoding="utf-8")
        (out / SEARCH).write_text(search_csv(results, table.measure), encoding="utf-8")
        if curves:
            scores_over_rounds(curves, study.title, study.measure, [out / name for name in CURVES])
    except OSError as error:
        raise DpfedError(
            f"the tables in {out} cannot be written: {error.strerror or error}"
        ) from None
    return table

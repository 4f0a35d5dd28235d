"""Write the tables of results: studies of `dpfed compare` -> results/*.csv."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results_specs import Spec

from dpfed.errors import DpfedError
from dpfed.report.tables import Row, paired

if TYPE_CHECKING:
    from dpfed.studies.outcomes import Outcome, Task
    from dpfed.studies.study import Progress, Study

Cells = dict[str, str]
Rows = list[Cells]
RATES = ("lr", "server_lr")
TRAFFIC = ("up_numbers", "up_bytes", "down_numbers", "down_bytes")
EPSILONS = ("server_worst", "third_party")
# Scores of language models on the reported half; empty for other models.
LANGUAGE = ("start_perplexity", "perplexity", "exact_match")
SPENT = tuple(f"epsilon_{view}" for view in EPSILONS)
COLUMNS = {
    "studies": (
        *("study", "title", "question", "axis", "done", "missing", "searching", "seeds"),
        *("machine", "versions", "command"),
    ),
    "arms": (
        *("study", "arm", "row", "column", "reference", *RATES, "grid", "tried", "inside_grid"),
        *("tuning_runs", "n", "mean", "std", "diverged"),
        *("difference", "interval_low", "interval_high", *SPENT, *TRAFFIC, "failed"),
    ),
    "runs": (
        *("study", "arm", "phase", "seed", *RATES, "accuracy", "loss", *LANGUAGE),
        *("diverged", *SPENT),
        *("delta", "sigma", "rounds", "seconds", *TRAFFIC, "run"),
    ),
    "curves": ("study", "arm", "seed", "round", "accuracy"),
}


# ------------------------------------------------------------------ reading studies


@dataclass
class Survey:
    """The state of a study, from its runs on the disk.

    missing    number of runs to do; a search can still ask for more
    """

    progress: Progress
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: int = 0
    searching: bool = False

    @property
    def done(self) -> int:
        return len(self.details)

    @property
    def to_do(self) -> str:
        least = "at least " if self.searching else ""
        return f"{least}{self.missing} to do"


def read_run(folder: Path) -> tuple[Outcome, dict[str, Any]] | None:
    """Return the outcome and the result of a run of any version, None if it is not finished."""
    from dpfed.studies.outcomes import Outcome, blind_of

    try:
        result = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if result["state"] not in ("finished", "stopped"):
            return None
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["accuracy"] is not None]
        diverged = bool(result.get("diverged", False))
        loss = rows[-1]["loss"]
        outcome = Outcome(
            accuracy=0.0 if diverged else float(rows[-1]["accuracy"]),
            loss=math.inf if diverged or loss is None else float(loss),
            records=int(result["test_records"]),
            blind=blind_of(result),
            diverged=diverged,
            epsilon=result["epsilon"],
            traffic=result.get("traffic"),
            curve=tuple((int(row["round"]), float(row["accuracy"])) for row in rows),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
        return None
    return outcome, result


def survey(study: Study, folder: Path) -> Survey:
    """Return the state of a study; read runs in the order in which compare asks for them."""
    from dpfed.registry import registry
    from dpfed.studies.outcomes import Outcome
    from dpfed.studies.search import initial, largest
    from dpfed.studies.study import Progress

    found = Survey(Progress(study, registry()))
    progress = found.progress
    first = largest([arm.space for arm in study.arms])
    failed = failures(folder)
    for i, arm in enumerate(study.arms):
        if arm.label in failed:
            if arm.grids:
                start = progress.tries(i, initial(arm.space, first)[0])[0]
            else:
                start = progress.task(i, (), 0)
            progress.outcomes[start.key] = Outcome(failed=failed[arm.label])
    while True:
        wanted = progress.wanted()
        before = len(found.details)
        for task in wanted:
            run = read_run(folder / "runs" / task.key)
            if run is not None:
                progress.outcomes[task.key], found.details[task.key] = run
        if len(found.details) == before:
            break
    able = [i for i in range(len(study.arms)) if progress.failure(i) is None]
    found.searching = any(task.tuning for task in wanted)
    found.missing = len(wanted)
    if found.searching:
        tried = [len(progress.scored(i)) for i in able if study.arms[i].grids]
        target = max(first + study.extra, *tried)
        found.missing = (
            study.search_seeds * sum(target - count for count in tried) + len(able) * study.seeds
        )
    return found


def failures(folder: Path) -> dict[str, str]:
    """Return the arms that could not be run, which only the study's table names."""
    try:
        rows = json.loads((folder / "table.json").read_text(encoding="utf-8"))["rows"]
        return {row["method"]: str(row["failed"]) for row in rows if row["failed"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def load_study(folder: Path) -> Study:
    """Read a study from the file that `dpfed compare` writes before its first run."""
    from dpfed.studies.arms import Arm
    from dpfed.studies.study import Study

    try:
        asked = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        arms = []
        for arm in asked.pop("arms"):
            arm["grids"] = {key: tuple(grid) for key, grid in arm["grids"].items()}
            arms.append(Arm(**{**arm, "overrides": tuple(arm["overrides"])}))
        return Study(**asked, arms=tuple(arms))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DpfedError(f"{folder} holds no study that can be read: {error}") from None


# ------------------------------------------------------------------ studies to CSV


def tables_of(spec: Spec, folder: Path) -> dict[str, Rows]:
    """Return the rows of one study for each CSV file."""
    study = load_study(folder)
    found = survey(study, folder)
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    made = sorted(
        {" ".join(f"{k} {v}" for k, v in d["versions"].items()) for d in found.details.values()}
    )
    about = {
        "study": spec.name,
        "title": spec.title,
        "question": spec.question,
        "axis": study.axis,
        "done": found.done,
        "missing": found.missing,
        "searching": "yes" if found.searching else "",
        "seeds": study.seeds,
        "machine": "; ".join(asked["machines"]),
        "versions": "; ".join(made),
        "command": asked["command"],
    }
    out: dict[str, Rows] = {"studies": [words(about)], "arms": [], "runs": [], "curves": []}
    labels = [arm.label for arm in study.arms]
    for i in range(len(labels)):
        arm, runs, curves = arm_rows(spec.name, found, i, labels)
        out["arms"].append(arm)
        out["runs"] += runs
        out["curves"] += curves
    with_statistics(out["arms"], out["runs"])
    return out


def arm_rows(name: str, found: Survey, i: int, labels: Sequence[str]) -> tuple[Cells, Rows, Rows]:
    """Return the rows of arm i for the tables of arms, runs and curves."""
    from dpfed.studies.search import at_edges

    progress = found.progress
    arm = progress.study.arms[i]
    failed = progress.failure(i)
    scored = {
        p: s for p, s in progress.scored(i).items() if progress.tries(i, p)[0].key in found.details
    }
    over = failed is None and (not arm.grids or (bool(scored) and not found.searching))
    point = progress.chosen(i) if over else ()
    runs = []
    curves = []
    for at in sorted(scored):
        for task in progress.tries(i, at):
            runs += run_rows(found, task, dict(zip(arm.grids, at, strict=True)), "tuning")
    for seed in range(progress.study.seeds) if over else ():
        task = progress.task(i, point, seed)
        runs += run_rows(found, task, dict(zip(arm.grids, point, strict=True)), "reported")
        curves += curve_rows(found, task)
    inside = ""
    if over and scored:
        inside = "no" if any(at_edges(scored)) else "yes"
    about = {
        "arm": arm.label,
        "row": arm.row or arm.label,
        "column": arm.column,
        "reference": reference_of(arm.reference, labels),
        **dict(zip(arm.grids, point, strict=False)),
        "grid": listed(arm.grids, arm.space),
        "failed": failed,
        "tuning_runs": progress.study.search_seeds * len(scored),
        "tried": listed(arm.grids, [sorted({p[k] for p in scored}) for k in range(len(arm.grids))]),
        "inside_grid": inside,
    }
    first = {"study": name, "arm": arm.label}
    arm_row = words({key: {**first, **about}.get(key) for key in COLUMNS["arms"]})
    return arm_row, [{**row, **first} for row in runs], [{**row, **first} for row in curves]


def run_rows(found: Survey, task: Task, rates: Mapping[str, float], phase: str) -> Rows:
    """Return the row of a run, none if it is not done; its study and arm are still empty."""
    if task.key not in found.details:
        return []
    outcome = found.progress.outcomes[task.key]
    result = found.details[task.key]
    row = {
        "phase": phase,
        "seed": task.tables["run"]["seed"],
        **rates,
        "accuracy": outcome.accuracy,
        "loss": outcome.loss if math.isfinite(outcome.loss) else None,
        "start_perplexity": result.get("start_perplexity"),
        "perplexity": result.get("test_perplexity"),
        "exact_match": (result.get("metrics") or {}).get("exact_match"),
        "diverged": "yes" if outcome.diverged else "",
        **{f"epsilon_{view}": outcome.epsilon.get(view) for view in EPSILONS},
        **(outcome.traffic or {}),
        **{key: result.get(key) for key in ("delta", "sigma", "rounds")},
        "run": task.key,
        "seconds": round(result["seconds"], 1),
    }
    return [words({key: row.get(key) for key in COLUMNS["runs"]})]


def curve_rows(found: Survey, task: Task) -> Rows:
    """Return a row for each evaluated round of a run; its study and arm are still empty."""
    if task.key not in found.details:
        return []
    seed = task.tables["run"]["seed"]
    curve = found.progress.outcomes[task.key].curve
    return [words({"seed": seed, "round": t, "accuracy": accuracy}) for t, accuracy in curve]


def listed(names: Iterable[str], values: Iterable[Iterable[float]]) -> str:
    return "; ".join(
        f"{name} {' '.join(f'{v:g}' for v in grid)}"
        for name, grid in zip(names, values, strict=True)
    )


def reference_of(name: str | None, labels: Sequence[str]) -> str | None:
    """Return the label of the reference arm, which contains its rate if that is fixed."""
    fixed = re.compile(re.escape(name or "") + r":lr=[^;]*")
    return next(
        (label for label in labels if name and (label == name or fixed.fullmatch(label))), None
    )


def words(row: Mapping[str, Any]) -> Cells:
    return {key: "" if value is None else str(value) for key, value in row.items()}


def with_statistics(arms: Rows, runs: Rows) -> None:
    """Fill in the statistics of the arms' reported runs; differences use the seeds of both arms."""
    reported: dict[str, dict[str, Cells]] = {}
    for row in runs:
        if row["phase"] == "reported":
            reported.setdefault(row["arm"], {})[row["seed"]] = row
    for arm in arms:
        mine = reported.get(arm["arm"], {})
        theirs = reported.get(arm["reference"], {})
        arm["n"] = str(len(mine))
        if not mine:
            continue
        accuracies = [float(row["accuracy"]) for row in mine.values()]
        found = Row(arm["arm"], scores=tuple(accuracies))
        difference = low = high = None
        both = [seed for seed in mine if seed in theirs]
        if both and arm["arm"] != arm["reference"]:
            pairs = [[float(side[seed]["accuracy"]) for seed in both] for side in (mine, theirs)]
            difference, half = paired(*pairs)
            if half is not None:
                low = difference - half
                high = difference + half
        first = next(iter(mine.values()))
        arm |= words(
            {
                "mean": found.mean,
                "std": found.std,
                "diverged": sum(bool(row["diverged"]) for row in mine.values()),
                "difference": difference,
                "interval_low": low,
                "interval_high": high,
                **{
                    f"epsilon_{v}": max((row[f"epsilon_{v}"] for row in mine.values()), key=_number)
                    for v in EPSILONS
                },
                **{key: first[key] for key in TRAFFIC},
            }
        )


def _number(text: str) -> float:
    return float(text) if text else -math.inf


# ------------------------------------------------------------------ CSV files


def read_csv(folder: Path, name: str) -> Rows:
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if any(set(row) != set(COLUMNS[name]) or None in row.values() for row in rows):
        raise DpfedError(f"{path} does not have the columns {', '.join(COLUMNS[name])}")
    return rows


def to_csv(name: str, rows: Rows) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS[name], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def collect(out: Path, folder: Path, specs: Sequence[Spec]) -> None:
    """Replace the rows of the studies in `out` in the CSV files; rows of other studies stay."""
    found = {
        spec.name: tables_of(spec, out / spec.name)
        for spec in specs
        if (out / spec.name / "asked.json").exists()
    }
    if not found:
        raise DpfedError(f"{out} holds none of the studies")
    folder.mkdir(parents=True, exist_ok=True)
    for name in COLUMNS:
        before: dict[str, Rows] = {}
        for row in read_csv(folder, name):
            before.setdefault(row["study"], []).append(row)
        rows = [
            r
            for s in specs
            for r in (found[s.name][name] if s.name in found else before.get(s.name, []))
        ]
        (folder / f"{name}.csv").write_text(to_csv(name, rows), encoding="utf-8")

"""Compare the recipe with changes of it, each at the best of its own learning rates.

    python experiments/recipe_candidates.py run --features DIR [--only VARIANT] [--tasks NAME]
    python experiments/recipe_candidates.py page [--check]

`run` adds rows to results/candidates.csv. Pairs of task and variant that are there are left out.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import recipe_runs
from recipe_runs import Row
from recipe_tasks import END, PAGE, ROOT, read_tasks

from dpfed.training.job.job import prepare
from dpfed.training.job.job_cache import JobCache

ROWS = ROOT / "results" / "candidates.csv"
BEGIN = "<!-- recipe: candidates -->"
COLUMNS = ("task", "variant", "seed", "schedule", "lr", "average", "accuracy", "loss")
AVERAGES = (0.0, 0.9, 0.95, 0.97)
TASKS = ("sst2-head-4", "fashion-linear-100", "cifar-head-50")
# Settings of each variant, and the factor of its rates: those of the task are for gamma = 0.9.
VARIANTS: dict[str, tuple[tuple[str, ...], float]] = {
    "gamma = 0.9": ((), 1),
    "gamma = 0": (("algorithm.gamma=0.0",), 10),
    "gamma = 0.5": (("algorithm.gamma=0.5",), 3),
    "gamma = 0.95": (("algorithm.gamma=0.95",), 0.5),
    "no bias correction": (("algorithm.bc=false",), 1),
    "second moments of blocks": (("algorithm.bc_level=block",), 1),
    "flat clipping, C = 1": (("privacy.clip_mode=flat",), 1),
    "flat clipping, C = 2.4": (("privacy.clip_mode=flat", "privacy.clip=2.4"), 1),
}
# Rows of the table: title, variant, schedule, average.
SHOWN = (
    ("the recipe's method", "gamma = 0.9", "constant", 0.95),
    *((name, name, "constant", 0.95) for name in VARIANTS if name != "gamma = 0.9"),
    ("cosine schedule", "gamma = 0.9", "cosine", 0.95),
    ("the last round, no average", "gamma = 0.9", "constant", 0.0),
    ("average 0.9", "gamma = 0.9", "constant", 0.9),
    ("average 0.97", "gamma = 0.9", "constant", 0.97),
)


def run(options: argparse.Namespace) -> None:
    cache = JobCache()
    done = {(row["task"], row["variant"]) for row in read_rows()}
    for task in read_tasks():
        for name, (settings, factor) in VARIANTS.items():
            unwanted = task.name not in options.tasks or (task.name, name) in done
            if unwanted or (options.only and name not in options.only):
                continue
            job = prepare(task.config(options.features, 0, settings), None, cache)
            schedules = ("constant", "cosine") if name == "gamma = 0.9" else ("constant",)
            rows = [Row(rate * factor, schedule) for rate in task.rates for schedule in schedules]
            found = recipe_runs.train(job, rows, AVERAGES)
            with ROWS.open("a", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                for row, vectors in zip(rows, found, strict=True):
                    for average, vector in vectors.items():
                        scores = recipe_runs.scores(job, vector)
                        facts = (task.name, name, 0, row.schedule, f"{row.lr:.4g}", average)
                        writer.writerow([*facts, *scores])
            print(f"{task.name}: {name}", flush=True)


def read_rows() -> list[dict[str, str]]:
    if not ROWS.exists():
        ROWS.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    rows = read_rows()
    lines = [f"| changed | {' | '.join(TASKS)} |", "|" + " --- |" * (1 + len(TASKS))]
    for title, variant, schedule, average in SHOWN:
        cells = []
        for task in TASKS:
            wanted = (task, variant, schedule, str(average))
            keys = ("task", "variant", "schedule", "average")
            own = [r for r in rows if tuple(r[k] for k in keys) == wanted]
            best = max((float(r["accuracy"]) for r in own), default=None)
            cells.append("not measured" if best is None else f"{100 * best:.1f} %")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(check: bool) -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if not check:
        PAGE.write_text(wanted, encoding="utf-8")
    return int(check and wanted != text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--features", type=Path, required=True)
    runner.add_argument("--only", nargs="+", default=[], metavar="VARIANT")
    runner.add_argument("--tasks", nargs="+", default=list(TASKS))
    commands.add_parser("page").add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.command == "page":
        return page(options.check)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure the recipe's learning rate against tuned ones, on the tasks of results/recipe.toml.

    python experiments/recipe_tasks.py features CONFIG FILE.npz [--set key=value]   frozen features
    python experiments/recipe_tasks.py run --features DIR [--only NAME] [--seeds 0 1]
    python experiments/recipe_tasks.py page [--check]                               docs/recipe.md

`run` adds rows to results/recipe.csv; rows that are there are not measured again. A task without
features is read as its settings say: give `--set data.path=...` if its data need a path.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import recipe_runs
from recipe_runs import Row

from dpfed.config import Config, build, load, overlay
from dpfed.config.parsing import overrides_layer
from dpfed.errors import DpfedError
from dpfed.privacy.planning.recipe import AVERAGE, recipe
from dpfed.privacy.published import show_loss
from dpfed.registry import registry
from dpfed.training.budget.spending import budget_of
from dpfed.training.job.job import Job, prepare
from dpfed.training.job.job_cache import JobCache

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "results" / "recipe.toml"
ROWS = ROOT / "results" / "recipe.csv"
PAGE = ROOT / "docs" / "recipe.md"
BEGIN = "<!-- recipe: table -->"
END = "<!-- end -->"
COLUMNS = (
    *("task", "half", "parameters", "clients", "cohort", "rounds", "local_steps", "epsilon"),
    *("sigma", "batch", "seed", "origin", "lr", "accuracy", "loss"),
)
COMMON = ["run.device=cpu", "run.threads=1"]
HEAD = (
    "| task | half | P | N | ε | σ/B | lr of the recipe | recipe | best | lr of the best | points |"
)


@dataclass(frozen=True)
class Task:
    """A task of results/recipe.toml, which explains the keys."""

    name: str
    half: str
    title: str
    set: tuple[str, ...]
    features: str | None = None
    rates: tuple[float, ...] = ()
    score: str = "accuracy"
    missing: str = ""

    def config(self, folder: Path | None, seed: int, more: Sequence[str] = ()) -> Config:
        settings = [*COMMON, *self.set, f"run.seed={seed}", *more]
        if self.features is not None:
            if folder is None:
                raise DpfedError(f"{self.name} reads {self.features}: give --features DIR")
            settings += ["data.name=npz", f"data.path={folder / self.features}"]
        if "model.name" not in " ".join(settings):
            settings.append("model.name=linear")
        tables = recipe(language=self.score == "loss")
        return build(overlay(tables, overrides_layer(settings)), registry())


def read_tasks() -> list[Task]:
    tables = tomllib.loads(TASKS.read_text(encoding="utf-8"))["task"]
    lists = [{k: tuple(v) if isinstance(v, list) else v for k, v in t.items()} for t in tables]
    return [Task(**table) for table in lists]


# ------------------------------------------------------------------ measure


def save_features(config: Config, file: Path) -> None:
    """Write the frozen model's features of all records, in the layout of the source `npz`."""
    job = prepare(config)
    if job.private.raw_inputs is None:
        raise DpfedError("this configuration has no frozen features: set model.train = head")
    arrays = {}
    for part, records in (("train", job.private.records), ("test", job.public.test)):
        (features,) = records.inputs.values()
        arrays[f"x_{part}"] = features.float().numpy()
        arrays[f"y_{part}"] = records.labels.numpy()
    np.savez(file, **arrays)


def measure(task: Task, config: Config, cache: JobCache) -> list[dict[str, Any]]:
    """Train the recipe's rate and the others; return one row for each rate."""
    job = prepare(config, None, cache)
    rates = {job.algorithm.base_lr: "recipe"}
    rates |= {rate: "grid" for rate in task.rates if rate not in rates}
    if config.model.name == "linear":
        vectors = recipe_runs.train(job, [Row(rate) for rate in rates], [AVERAGE])
        found = [recipe_runs.scores(job, vector[AVERAGE]) for vector in vectors]
    else:
        found = [recipe_runs.alone(with_rate(job, rate)) for rate in rates]
    facts = facts_of(task, job)
    return [
        {**facts, "origin": origin, "lr": f"{rate:.4g}", "accuracy": acc, "loss": loss}
        for (rate, origin), (acc, loss) in zip(rates.items(), found, strict=True)
    ]


def with_rate(job: Job, rate: float) -> Job:
    from dataclasses import replace

    algorithm = replace(job.config.algorithm, lr=rate)
    return replace(job, config=replace(job.config, algorithm=algorithm))


def facts_of(task: Task, job: Job) -> dict[str, Any]:
    run = job.config.run
    planned = budget_of(job.plan, job.schedule, job.config.privacy.delta).planned
    return {
        "task": task.name,
        "half": task.half,
        "parameters": job.space.size,
        "clients": job.schedule.clients,
        "cohort": job.schedule.cohort,
        "rounds": run.rounds,
        "local_steps": run.local_steps,
        "epsilon": planned.server_worst,
        "sigma": float(job.plan.multipliers.max()),
        "batch": float(job.plan.expected.mean()),
        "seed": run.seed,
    }


def run(options: argparse.Namespace) -> None:
    cache = JobCache()
    for task in read_tasks():
        if task.missing or (options.only and task.name not in options.only):
            continue
        for seed in options.seeds:
            if any((r["task"], r["seed"]) == (task.name, str(seed)) for r in read_rows()):
                continue
            rows = measure(task, task.config(options.features, seed, options.set), cache)
            append(rows)
            print(f"{task.name}, seed {seed}: {len(rows)} rates", flush=True)


# ------------------------------------------------------------------ rows and page


def read_rows() -> list[dict[str, str]]:
    if not ROWS.exists():
        return []
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append(rows: Sequence[dict[str, Any]]) -> None:
    new = not ROWS.exists()
    with ROWS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def distance(task: Task, rows: Sequence[dict[str, str]]) -> tuple[dict[str, Any], float]:
    """Return the means of the recipe's rate and of the best one, and the distance in points.

    A rate that has fewer seeds than the recipe's does not count.
    """
    own = next(row["lr"] for row in rows if row["origin"] == "recipe")
    seeds = sum(row["lr"] == own for row in rows)
    means: dict[str, float] = {}
    for lr in dict.fromkeys(row["lr"] for row in rows):
        values = [float(row[task.score]) for row in rows if row["lr"] == lr]
        if len(values) == seeds:
            means[lr] = sum(values) / len(values)
    if task.score == "loss":
        best = min(means, key=means.__getitem__)
        points = 100 * (means[own] / means[best] - 1)
    else:
        best = max(means, key=means.__getitem__)
        points = 100 * (means[best] - means[own])
    return {"lr": own, "score": means[own], "best_lr": best, "best": means[best]}, points


def table() -> str:
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    points: dict[str, list[float]] = {}
    rows = read_rows()
    for task in read_tasks():
        own = [row for row in rows if row["task"] == task.name]
        if not own:
            target = next(s for s in task.set if "epsilon" in s).partition("=")[2]
            epsilon = show_loss(float(target), 2)
            missing = f"not measured: {task.missing or 'no run yet'}"
            lines.append(f"| {task.title} | {task.half} | | | {epsilon} | | | {missing} | | | |")
            continue
        found, behind = distance(task, own)
        first = own[0]
        epsilon = show_loss(float(first["epsilon"]), 2)
        noise = float(first["sigma"]) / float(first["batch"])
        scores = [f"{100 * found[k]:.1f} %" for k in ("score", "best")]
        if task.score == "loss":
            scores = [f"{found[k]:.3f}" for k in ("score", "best")]
        searched = f"{scores[1]} | {found['best_lr']} | {behind:.1f}"
        if task.rates:
            points.setdefault(task.half, []).append(behind)
        else:
            searched = "not searched | |"
        lines.append(
            f"| {task.title} | {task.half} | {int(first['parameters']):,} | {first['clients']} | "
            f"{epsilon} | {noise:.3f} | {found['lr']} | {scores[0]} | "
            f"{searched} |"
        )
    for half, values in points.items():
        mean = sum(values) / len(values)
        lines.append("")
        lines.append(
            f"Distance on the {half} half: mean {mean:.1f}, worst {max(values):.1f} points, "
            f"{len(values)} tasks."
        )
    return "\n".join(lines)


def page(check: bool) -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if check:
        return int(wanted != text)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("features")
    maker.add_argument("config")
    maker.add_argument("file", type=Path)
    maker.add_argument("--set", action="append", default=[])
    runner = commands.add_parser("run")
    runner.add_argument("--features", type=Path)
    runner.add_argument("--only", nargs="+", default=[])
    runner.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    runner.add_argument("--set", action="append", default=[])
    commands.add_parser("page").add_argument("--check", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.command == "features":
        save_features(load(options.config, options.set, registry()), options.file)
    elif options.command == "run":
        run(options)
    else:
        return page(options.check)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DpfedError as error:
        sys.exit(f"recipe_tasks: {error}")

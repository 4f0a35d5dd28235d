"""Accuracy against epsilon for the head of CIFAR-10: the recipe, DP-FedAvg, and no privacy.

    python experiments/recipe_flagship.py run --features DIR [--seeds 0] [--epsilons 1 4.363]
    python experiments/recipe_flagship.py page [--check]

`run` adds rows to results/flagship.csv. `page` writes the table of docs/results.md and its picture.
The recipe has one learning rate; the other methods are shown at the best of their rates.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import recipe_runs
from make_pictures import COLOURS, IMAGES
from matplotlib import pyplot
from recipe_runs import Row
from recipe_tasks import COMMON, ROOT

from dpfed.config import Config, build, overlay
from dpfed.config.parsing import overrides_layer
from dpfed.privacy.planning.recipe import AVERAGE, recipe
from dpfed.privacy.published import show_loss
from dpfed.registry import registry
from dpfed.training.budget.spending import budget_of
from dpfed.training.job.job import prepare
from dpfed.training.job.job_cache import JobCache

ROWS = ROOT / "results" / "flagship.csv"
PAGE = ROOT / "docs" / "results.md"
BEGIN = "<!-- flagship: table -->"
END = "<!-- flagship: end -->"
COLUMNS = ("features", "method", "epsilon", "sigma", "batch", "seed", "lr", "accuracy", "loss")
# What the head reads, and the file of these features.
FEATURES = {"all layers": "cifar10-swin-layers.npz", "last layer": "cifar10-swin.npz"}
EPSILONS = (0.5, 1.0, 2.0, 4.363, 8.0)
PLAIN = "no privacy"
RATES = {"dp-fedavg": (0.1, 0.3, 1.0, 3.0), PLAIN: (0.003, 0.01, 0.03, 0.1)}
FEDERATION = [
    *("data.clients=50", "data.alpha=0.1", "model.name=linear", "run.participation=0.1"),
    *("run.rounds=100", "run.local_steps=20"),
]
# What the lines of the picture show: what the head reads, the method, and the marker.
LINES = (
    ("all layers", "dp-fedadamw", "o-"),
    ("all layers", "dp-fedavg", "s-"),
    ("last layer", "dp-fedadamw", "o--"),
    ("last layer", "dp-fedavg", "s--"),
)
LABELS = {"dp-fedadamw": "recipe", "dp-fedavg": "DP-FedAvg, best of 4 rates"}


def config_of(method: str, epsilon: float | None, file: Path, seed: int) -> Config:
    settings = [*COMMON, *FEDERATION, "data.name=npz", f"data.path={file}", f"run.seed={seed}"]
    if epsilon is None:
        settings += ["privacy.enabled=false", "privacy.batch=256"]
    else:
        settings.append(f"privacy.target_epsilon={epsilon}")
    tables = recipe()
    if method != "dp-fedadamw":
        tables["algorithm"] = {"name": "dp-fedavg"}
    if epsilon is None:
        del tables["privacy"]
    return build(overlay(tables, overrides_layer(settings)), registry())


def measure(read: str, method: str, config: Config, cache: JobCache) -> list[dict[str, Any]]:
    job = prepare(config, None, cache)
    rates = RATES.get(method) or (job.algorithm.base_lr,)
    vectors = recipe_runs.train(job, [Row(rate) for rate in rates], [AVERAGE])
    private = job.plan.private
    spent = budget_of(job.plan, job.schedule, config.privacy.delta).planned.server_worst
    rows = []
    for rate, vector in zip(rates, vectors, strict=True):
        accuracy, loss = recipe_runs.scores(job, vector[AVERAGE])
        rows.append(
            {
                "features": read,
                "method": method,
                "epsilon": spent if private else "",
                "sigma": float(job.plan.multipliers.max()),
                "batch": float(job.plan.expected.mean()),
                "seed": config.run.seed,
                "lr": f"{rate:.4g}",
                "accuracy": accuracy,
                "loss": loss,
            }
        )
    return rows


def run(options: argparse.Namespace) -> None:
    cache = JobCache()
    read = options.read
    file = options.features / FEATURES[read]
    for seed in options.seeds:
        plans = [(m, e) for e in options.epsilons for m in options.methods if m != PLAIN]
        plans += [(PLAIN, None)] * (PLAIN in options.methods)
        for method, epsilon in plans:
            append(measure(read, method, config_of(method, epsilon, file, seed), cache))
            print(f"{read}: {method}, epsilon {epsilon}, seed {seed}", flush=True)


def append(rows: list[dict[str, Any]]) -> None:
    new = not ROWS.exists()
    with ROWS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


# ------------------------------------------------------------------ page

Cell = tuple[float, int]
"""The mean accuracy at the best rate, and its number of seeds."""


def cells() -> dict[tuple[str, str, float | None], Cell]:
    """Return a cell for what the head reads, each method and each target epsilon."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, str, float | None], dict[str, list[float]]] = {}
    for row in rows:
        spent = float(row["epsilon"]) if row["epsilon"] else None
        target = None if spent is None else min(EPSILONS, key=lambda e, s=spent: abs(e - s))
        rates = found.setdefault((row["features"], row["method"], target), {})
        rates.setdefault(row["lr"], []).append(float(row["accuracy"]))
    return {
        key: max((sum(values) / len(values), len(values)) for values in rates.values())
        for key, rates in found.items()
    }


def table() -> str:
    measured = cells()
    columns = [(read, method) for read in FEATURES for method in LABELS]
    titles = [f"{LABELS[method]}, {read}" for read, method in columns]
    lines = [f"| ε | {' | '.join(titles)} |", "|" + " --- |" * (1 + len(columns))]
    for epsilon in EPSILONS:
        shown = [text(measured.get((*column, epsilon))) for column in columns]
        lines.append(f"| {show_loss(epsilon, 2)} | {' | '.join(shown)} |")
    plain = [text(measured.get((read, PLAIN, None))) for read in FEATURES]
    lines.append(f"| no privacy | | {plain[0]} | | {plain[1]} |")
    return "\n".join(lines)


def text(cell: Cell | None) -> str:
    if cell is None:
        return "not measured"
    seeds = "1 seed" if cell[1] == 1 else f"{cell[1]} seeds"
    return f"{100 * cell[0]:.1f} % ({seeds})"


def draw(theme: str) -> None:
    colours = COLOURS[theme]
    measured = cells()
    style = {"svg.fonttype": "none", "svg.hashsalt": "dpfed", "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
        for read, method, marker in LINES:
            keys = [(read, method, e) for e in EPSILONS]
            points = [(key[2], 100 * measured[key][0]) for key in keys if key in measured]
            if points:
                label = f"{LABELS[method]}, {read}"
                axes.plot(*zip(*points, strict=True), marker, color=colours[method], label=label)
        plain = measured.get(("last layer", PLAIN, None))
        if plain is not None:
            label = f"{PLAIN}, last layer"
            axes.axhline(100 * plain[0], color=colours["soft"], linestyle=":", label=label)
        axes.set_xscale("log")
        axes.set_xticks(EPSILONS, [show_loss(e, 2) for e in EPSILONS])
        axes.minorticks_off()
        axes.set_xlabel("ε", color=colours["ink"])
        axes.set_ylabel("accuracy %", color=colours["ink"])
        axes.tick_params(colors=colours["soft"])
        axes.grid(color=colours["grid"])
        for spine in axes.spines.values():
            spine.set_color(colours["grid"])
        axes.legend(frameon=False, labelcolor=colours["ink"])
        figure.tight_layout()
        path = IMAGES / f"flagship-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def page(check: bool) -> int:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    wanted = f"\n{table()}\n"
    if check:
        return int(old != wanted)
    PAGE.write_text(f"{before}{BEGIN}{wanted}{END}{after}", encoding="utf-8")
    for theme in ("light", "dark"):
        draw(theme)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--features", type=Path, required=True)
    runner.add_argument("--read", choices=list(FEATURES), default="all layers")
    runner.add_argument("--seeds", nargs="+", type=int, default=[0])
    runner.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    runner.add_argument("--methods", nargs="+", default=["dp-fedadamw", *RATES])
    commands.add_parser("page").add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.command == "page":
        return page(options.check)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

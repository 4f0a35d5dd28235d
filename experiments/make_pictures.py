"""Draw the pictures of the README and the documentation, for light and for dark pages.

    python experiments/make_pictures.py              draw from docs/images/numbers.json (seconds)
    python experiments/make_pictures.py --measure    first run the commands (15 minutes)

The commands stand under the pictures: `dpfed run` with five seeds, and `dpfed compare --preset
epsilon`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NUMBERS = IMAGES / "numbers.json"
# Written by benchmarks/fleet_growth.py --out on a GPU.
GROWTH = IMAGES / "growth.json"
SEEDS = 5
METHODS = ("dp-fedavg", "dp-local-adamw", "dp-fedadamw")
STUDY = [
    *("compare", "digits", "--preset", "epsilon"),
    *("--algorithms", ",".join(METHODS), "--seeds", str(SEEDS)),
    *("--set", "run.eval_every=30", "--set", "run.checkpoint_every=0"),
]

# Colours of Okabe and Ito (2008) for any colour vision, lighter ones on dark pages.
COLOURS = {
    "light": {
        "ink": "#1f2328",
        "soft": "#59636e",
        "grid": "#dde3e9",
        "dp-fedadamw": "#0072B2",
        "dp-fedavg": "#B85A00",
        "dp-local-adamw": "#00785A",
        "budget": "#59636e",
    },
    "dark": {
        "ink": "#f0f6fc",
        "soft": "#9198a1",
        "grid": "#2b323a",
        "dp-fedadamw": "#56B4E9",
        "dp-fedavg": "#E69F00",
        "dp-local-adamw": "#33C79A",
        "budget": "#9198a1",
    },
}
MARKERS = {"dp-fedadamw": "o", "dp-fedavg": "s", "dp-local-adamw": "^"}
NAMES = {"dp-fedadamw": "DP-FedAdamW", "dp-fedavg": "DP-FedAvg", "dp-local-adamw": "DP-LocalAdamW"}


# ------------------------------------------------------------------ numbers


def dpfed(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "dpfed", *args], check=True)


def measured(workers: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        runs = [one_run(Path(folder) / f"run{seed}", seed) for seed in range(SEEDS)]
        study = Path(folder) / "study"
        dpfed(*STUDY, *workers, "--out", str(study))
        return {"run": runs, "compare": cells(study)}


def one_run(out: Path, seed: int) -> dict[str, Any]:
    dpfed("run", "--set", f"run.seed={seed}", "--out", str(out))
    rows = [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {
        "seed": seed,
        "epsilon": [round(row["epsilon_server_max"], 4) for row in rows],
        "accuracy": [round(row["accuracy"], 4) for row in rows],
    }


def cells(study: Path) -> list[dict[str, Any]]:
    """Return method, epsilon and the accuracy of each seed on the half that no search used."""
    table = json.loads((study / "table.json").read_text(encoding="utf-8"))
    return [
        {
            "method": arm["row"],
            "epsilon": float(arm["column"]),
            "accuracies": [round(a, 4) for a in arm["accuracies"]],
        }
        for arm in table["rows"]
    ]


# ------------------------------------------------------------------ drawing


def begin(theme: str, size: tuple[float, float]) -> tuple[Any, Any, dict[str, str]]:
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    return figure, plain(figure, axes, COLOURS[theme]), COLOURS[theme]


def plain(figure: Any, axes: Any, colours: dict[str, str]) -> Any:
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colours["soft"])
    axes.tick_params(colors=colours["soft"], labelcolor=colours["ink"])
    axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def titled(axes: Any, colours: dict[str, str], title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", color=colours["ink"], fontsize=13, fontweight="bold", pad=26)
    axes.text(
        0,
        1.03,
        subtitle,
        transform=axes.transAxes,
        color=colours["soft"],
        fontsize=9.5,
        va="bottom",
    )


def finish(figure: Any, axes: Any, colours: dict[str, str], path: Path) -> None:
    axes.xaxis.label.set_color(colours["ink"])
    axes.yaxis.label.set_color(colours["ink"])
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    pyplot.close(figure)
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def draw_run(runs: list[dict[str, Any]], theme: str, path: Path) -> None:
    """Draw accuracy against epsilon, round by round."""
    figure, axes, colours = begin(theme, (7.2, 4.0))
    colour = colours["dp-fedadamw"]
    epsilon = runs[0]["epsilon"][1:]
    columns = list(zip(*(run["accuracy"][1:] for run in runs), strict=True))
    mean = [100 * sum(values) / len(values) for values in columns]
    axes.fill_between(
        epsilon,
        [100 * min(v) for v in columns],
        [100 * max(v) for v in columns],
        color=colour,
        alpha=0.22,
        linewidth=0,
    )
    axes.plot(epsilon, mean, "-o", color=colour, linewidth=2.2, markersize=4.5)
    axes.axvline(8, color=colours["budget"], linestyle=(0, (4, 3)), linewidth=1.4)
    axes.annotate(
        "the budget\nε = 8",
        (8, 88.6),
        xytext=(7, 0),
        textcoords="offset points",
        color=colours["soft"],
        fontsize=9.5,
    )
    for i, where in ((0, (16, -40)), (9, (0, -42)), (29, (-86, 24))):
        axes.annotate(
            f"round {i + 1}: {mean[i]:.1f} %",
            (epsilon[i], mean[i]),
            xytext=where,
            textcoords="offset points",
            color=colours["ink"],
            fontsize=9.5,
        )
    axes.set(
        xlim=(1.9, 9.0),
        ylim=(88, 98),
        xlabel="privacy spent by each client: ε at δ = 10⁻⁵ (server's view)",
    )
    axes.set_ylabel("accuracy on the test set, %")
    titled(
        axes,
        colours,
        "Handwritten digits at ten clients, every record protected",
        f"dpfed run · 30 rounds · mean and range of {len(runs)} seeds · before training: "
        f"{100 * sum(r['accuracy'][0] for r in runs) / len(runs):.0f} %",
    )
    finish(figure, axes, colours, path)


def draw_compare(table: list[dict[str, Any]], theme: str, path: Path) -> None:
    figure, axes, colours = begin(theme, (7.2, 4.0))
    budgets = sorted({row["epsilon"] for row in table})
    for place, method in enumerate(METHODS):
        rows = sorted(
            (row for row in table if row["method"] == method), key=lambda row: row["epsilon"]
        )
        shift = 0.07 * (place - 1)
        means = [100 * sum(row["accuracies"]) / len(row["accuracies"]) for row in rows]
        low = [m - 100 * min(row["accuracies"]) for m, row in zip(means, rows, strict=True)]
        high = [100 * max(row["accuracies"]) - m for m, row in zip(means, rows, strict=True)]
        axes.errorbar(
            [row["epsilon"] + shift for row in rows],
            means,
            yerr=[low, high],
            fmt=f"-{MARKERS[method]}",
            color=colours[method],
            linewidth=2,
            markersize=7,
            capsize=3,
            elinewidth=1.3,
            label=NAMES[method],
        )
    axes.set_xticks(budgets, [f"{value:g}" for value in budgets])
    axes.set(
        xlim=(budgets[0] - 0.35, budgets[-1] + 0.35),
        xlabel="privacy budget: ε at δ = 10⁻⁵ (server's view)",
    )
    axes.set_ylabel("accuracy on the test half, %")
    axes.legend(loc="lower right", frameon=False, labelcolor=colours["ink"], fontsize=10)
    titled(
        axes,
        colours,
        "Three optimizers on the digits, each at its own best learning rate",
        f"dpfed compare --preset epsilon · mean and range of {len(table[0]['accuracies'])} seeds",
    )
    finish(figure, axes, colours, path)


def draw_growth(found: dict[str, Any], theme: str, path: Path) -> None:
    """Draw a step's time per client by cohort (left), and of five clients by rank (right)."""
    colours = COLOURS[theme]
    rows = [row for row in found["rows"] if row["ms"] is not None]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.6, 3.9), layout="constrained")
    rank = rows[0]["trained"]
    cohorts = sorted(
        (row for row in rows if row["trained"] == rank), key=lambda row: row["clients"]
    )
    trained = sorted((row for row in rows if row["clients"] == 5), key=lambda row: row["P"])
    growth_line(plain(figure, left, colours), cohorts, ("clients", "ms_per_client"), colours)
    growth_line(plain(figure, right, colours), trained, ("P", "ms"), colours)
    left.set_xticks([row["clients"] for row in cohorts], [str(row["clients"]) for row in cohorts])
    left.minorticks_off()
    left.set(xlabel="clients in a step, 16 records each", ylabel="milliseconds for each client")
    right.set(xlabel="numbers trained", ylabel="milliseconds for a step of 5 clients")
    titled(
        left,
        colours,
        "A client costs less in company",
        f"{found['model']}, LoRA {rank} · peak GiB at each point",
    )
    titled(
        right,
        colours,
        "Rank costs little",
        f"{found['device']}, one private local step",
    )
    right.xaxis.label.set_color(colours["ink"])
    right.yaxis.label.set_color(colours["ink"])
    finish(figure, left, colours, path)


def growth_line(
    axes: Any, rows: list[dict[str, Any]], keys: tuple[str, str], colours: dict[str, str]
) -> None:
    """Draw one panel of the growth picture, with the peak memory at each point."""
    x, y = keys
    points = [(row[x], row[y]) for row in rows]
    axes.plot(*zip(*points, strict=True), "-o", color=colours["dp-fedadamw"], linewidth=2.2)
    for row, point in zip(rows, points, strict=True):
        text = f"{row['peak_gib']:.1f}" + (f"\n{row['trained']}" if x == "P" else "")
        axes.annotate(
            text,
            point,
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=colours["soft"],
            fontsize=8.5,
        )
    axes.set(xscale="log", ylim=(0, 1.3 * max(row[y] for row in rows)))
    axes.margins(x=0.12)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="run the commands first")
    parser.add_argument(
        "--workers", help="processes of the study; default: as dpfed compare chooses"
    )
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    options = parser.parse_args()
    if options.measure:
        numbers = measured(["--workers", options.workers] if options.workers else [])
        NUMBERS.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    # Keep text as text, so that files are small; the salt makes equal numbers give equal files.
    style = {"svg.fonttype": "none", "svg.hashsalt": "dpfed", "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        for theme in COLOURS:
            draw_run(numbers["run"], theme, options.out / f"run-{theme}.svg")
            draw_compare(numbers["compare"], theme, options.out / f"compare-{theme}.svg")
            draw_growth(
                json.loads(GROWTH.read_text(encoding="utf-8")),
                theme,
                options.out / f"growth-{theme}.svg",
            )


if __name__ == "__main__":
    main()

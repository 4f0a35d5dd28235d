"""Measure the paper's three challenges: spread of second moments, effect of noise, client drift.

    python experiments/mechanism.py run --out DIR --set data.path=... --set model.weights=...
    python experiments/mechanism.py draw [DIR]     write results/mechanism.json and the pictures

`run` trains results/vision.toml with run.diagnostics for each arm below, at the learning rate that
vision-main found for its method. All arms of LocalAdamW have the rate of DP-LocalAdamW, so they
differ in noise and skew only. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.training.callbacks.diagnostics import read_diagnostics

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "results" / "vision.toml"
NUMBERS = ROOT / "results" / "mechanism.json"
IMAGES = ROOT / "docs" / "images"
FREE = "privacy.enabled=false"
IID = "data.partition=iid"
CURVES = ("v_relative_variance", "drift")


@dataclass(frozen=True)
class Arm:
    name: str
    label: str
    algorithm: str
    lr: float
    sets: tuple[str, ...] = ()


ARMS = (
    Arm("adamw", "DP-FedAdamW", "dp-fedadamw", 0.00119),
    Arm("local", "DP-LocalAdamW", "dp-local-adamw", 0.00283),
    Arm("local-iid", "DP-LocalAdamW, IID", "dp-local-adamw", 0.00283, (IID,)),
    Arm("local-free", "LocalAdamW, no privacy", "dp-local-adamw", 0.00283, (FREE,)),
    Arm("local-free-iid", "LocalAdamW, no privacy, IID", "dp-local-adamw", 0.00283, (FREE, IID)),
    Arm("fedavg", "DP-FedAvg", "dp-fedavg", 0.4),
    Arm("fedavg-free", "FedAvg, no privacy", "dp-fedavg", 0.1, (FREE,)),
)
# The arms of each panel.
SPREAD = ("local", "local-iid", "local-free", "local-free-iid", "adamw")
SHIFT = ("local", "local-free", "adamw")
DRIFT = ("local", "local-free", "fedavg", "fedavg-free", "adamw")


# ------------------------------------------------------------------ run


def words_of(arm: Arm, out: Path, config: Path, given: Sequence[str]) -> list[str]:
    """Return the words after `dpfed`."""
    sets = [
        *given,
        f"algorithm.name={arm.algorithm}",
        f"algorithm.lr={arm.lr!r}",
        "run.diagnostics=true",
        *arm.sets,
    ]
    words = [word for item in sets for word in ("--set", item)]
    return ["run", str(config), *words, "--out", str(out / arm.name)]


def result_in(folder: Path, arm: Arm) -> dict[str, Any] | None:
    """Return the result of a finished run of this method at this rate, None if there is none."""
    try:
        result = dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
        made = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["algorithm"]
    except (OSError, ValueError, KeyError):
        return None
    same = (made.get("name"), made.get("lr")) == (arm.algorithm, arm.lr)
    return result if same and result.get("state") == "finished" else None


def run(out: Path, given: Sequence[str], jobs: int, config: Path = CONFIG) -> int:
    out.mkdir(parents=True, exist_ok=True)

    def one(arm: Arm) -> int:
        if result_in(out / arm.name, arm):
            return 0
        command = [sys.executable, "-m", "dpfed", *words_of(arm, out, config, given), "--force"]
        with (out / f"{arm.name}.log").open("wb") as log:
            return subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode

    with ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(one, ARMS))
    for arm, code in zip(ARMS, codes, strict=True):
        state = "done" if code == 0 else f"exit code {code}, see {out / arm.name}.log"
        print(f"{arm.name}: {state}")
    return int(any(codes))


# ------------------------------------------------------------------ numbers


def gathered(out: Path) -> dict[str, Any]:
    """Return the numbers of the runs for the pictures and the page, without paths."""
    arms: dict[str, Any] = {}
    for arm in ARMS:
        result = result_in(out / arm.name, arm)
        rows = read_diagnostics(out / arm.name)
        if result is None or not rows:
            raise DpfedError(
                f"{out / arm.name} holds no finished run of it: mechanism.py run comes first"
            )
        whole = [row for row in rows if "sqrt_v_histogram" in row]
        arms[arm.name] = {
            "label": arm.label,
            "lr": arm.lr,
            "accuracy": result["test_accuracy"],
            "rounds": [row["round"] for row in rows],
            "noise_std": rows[-1]["noise_std"],
            **{key: [_short(row[key]) for row in rows] for key in CURVES if key in rows[-1]},
        }
        if whole:
            arms[arm.name]["sqrt_v"] = whole[-1]["sqrt_v_histogram"]
            arms[arm.name]["log10"] = whole[-1]["histogram_log10"]
    return {"versions": result["versions"] if result else {}, "arms": arms}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _said(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def median_root(arm: Mapping[str, Any]) -> float:
    """Return the median of √v over coordinates and clients, from its histogram."""
    counts = arm["sqrt_v"]
    low, high = arm["log10"]
    below = list(accumulate(counts))
    at = next(i for i, seen in enumerate(below) if seen >= below[-1] / 2)
    return float(10 ** (low + (at + 0.5) * (high - low) / len(counts)))


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the table of the page.

    Spread and drift are those of the middle round, since steps are nearly 0 in the last one. √v is
    that of the last round.
    """
    out = ["| method | accuracy % | spread of v | median of √v | drift |", "|---|---|---|---|---|"]
    for arm in found["arms"].values():
        spread, drift = (
            _said(arm[key][(len(arm[key]) - 1) // 2] if key in arm else None) for key in CURVES
        )
        root = _said(median_root(arm) if "sqrt_v" in arm else None)
        out.append(
            f"| {arm['label']} | {100 * arm['accuracy']:.1f} | {spread} | {root} | {drift} |"
        )
    return out


# ------------------------------------------------------------------ pictures


def draw(found: Mapping[str, Any], images: Path) -> None:
    import make_pictures as pictures
    from matplotlib import pyplot
    from results_page import LINES, STYLES

    order = [arm.name for arm in ARMS]
    images.mkdir(parents=True, exist_ok=True)
    for theme, shades in LINES.items():
        colours = pictures.COLOURS[theme]
        with pyplot.rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "dpfed", "font.family": "sans-serif"}
        ):
            figure, panels = pyplot.subplots(1, 3, figsize=(13.2, 4.2), layout="constrained")
            for axes, names in zip(panels, (SPREAD, SHIFT, DRIFT), strict=True):
                pictures.plain(figure, axes, colours)
                for name in names:
                    at = order.index(name)
                    style = {
                        "color": shades[at],
                        "linestyle": STYLES[at % len(STYLES)],
                        "linewidth": 1.8,
                    }
                    _line(axes, found["arms"][name], names, style)
                axes.legend(frameon=False, labelcolor=colours["ink"], fontsize=8.5)
                axes.xaxis.label.set_color(colours["ink"])
                axes.yaxis.label.set_color(colours["ink"])
            _describe(panels, colours, found["arms"]["local"]["noise_std"])
            panels[1].set_xlim(*_range([found["arms"][name] for name in SHIFT]))
            pictures.finish(figure, panels[0], colours, images / f"mechanism-{theme}.svg")


def _line(
    axes: Any, arm: Mapping[str, Any], panel: Sequence[str], style: Mapping[str, Any]
) -> None:
    if panel is SHIFT:
        counts = arm["sqrt_v"]
        low, high = arm["log10"]
        width = (high - low) / len(counts)
        at = [10 ** (low + (i + 0.5) * width) for i in range(len(counts))]
        axes.plot(at, [100 * count / sum(counts) for count in counts], label=arm["label"], **style)
        return
    values = arm["v_relative_variance" if panel is SPREAD else "drift"]
    axes.plot(arm["rounds"], values, label=arm["label"], **style)


def _range(arms: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return a range of √v that holds every bin with a thousandth of an arm's coordinates."""
    at = [
        i
        for arm in arms
        for i, count in enumerate(arm["sqrt_v"])
        if count > sum(arm["sqrt_v"]) / 1000
    ]
    low, high = arms[0]["log10"]
    width = (high - low) / len(arms[0]["sqrt_v"])
    return 10 ** (low + (min(at) - 2) * width), 10 ** (low + (max(at) + 3) * width)


def _describe(panels: Sequence[Any], colours: Mapping[str, str], noise: float) -> None:
    import make_pictures as pictures

    spread, shift, drift = panels
    spread.set(xlabel="round", ylabel="variance over clients / mean square", yscale="log")
    shift.set(xlabel="√v, last round", ylabel="coordinates, %", xscale="log")
    shift.axvline(noise, color=colours["soft"], linewidth=1, linestyle=":")
    shift.annotate(
        "σC/B",
        (noise, 1),
        xycoords=("data", "axes fraction"),
        color=colours["soft"],
        fontsize=9,
        ha="left",
    )
    drift.set(xlabel="round", ylabel="distance from the mean client", yscale="log")
    pictures.titled(
        spread, colours, "Spread of v between clients", "relative to its size, end of each round"
    )
    pictures.titled(shift, colours, "Where noise puts √v", "noise alone puts it at σC/B")
    pictures.titled(
        drift, colours, "Client drift", "end of each round, each method at a rate found for it"
    )


# ------------------------------------------------------------------ command line


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="one run for each arm")
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    runner.add_argument("--jobs", type=int, default=1, help="runs at a time")
    runner.add_argument("--config", type=Path, default=CONFIG)
    drawer = commands.add_parser("draw", help="numbers and pictures")
    drawer.add_argument(
        "folder", type=Path, nargs="?", help="of the runs; without it the numbers stay as they are"
    )
    drawer.add_argument("--numbers", type=Path, default=NUMBERS)
    drawer.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args(words)
    if options.command == "run":
        return run(options.out, options.set, options.jobs, options.config)
    if options.folder is not None:
        found = gathered(options.folder)
        options.numbers.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if not options.numbers.exists():
        raise DpfedError(f"there is no {options.numbers}: give the folder of the runs")
    found = json.loads(options.numbers.read_text(encoding="utf-8"))
    draw(found, options.images)
    print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DpfedError as error:
        print(f"mechanism: {error}", file=sys.stderr)
        sys.exit(2)

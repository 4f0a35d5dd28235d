"""Plots as PNG or SVG, drawn with matplotlib off screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.private_files import open_private
from dpfed.privacy.published import show_delta

BLUE, ORANGE = "#0072B2", "#D55E00"  # distinguishable with any colour vision (Okabe, Ito 2008)


def epsilon_over_rounds(planned: Planned, path: Path) -> None:
    """Epsilon after each round for the server (a client in every round) and for a third party."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if path.suffix.lower() not in (".png", ".svg"):
        raise DpfedError(f"--plot {path} must end in .png or .svg")
    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    at, server, third = planned.over_rounds()
    axes.plot(at, server, "-", color=BLUE, label="server, a client in every round", linewidth=2)
    axes.plot(at, third, "--", color=ORANGE, label="third party", linewidth=2)
    axes.set_xlabel("round")
    axes.set_ylabel(f"epsilon at delta = {show_delta(planned.delta)}")
    axes.set_title("Privacy spent over rounds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        # The counts are not noised.
        with open_private(path, "wb") as file:
            figure.savefig(file, dpi=150, format=path.suffix[1:].lower())
    except OSError as error:
        raise DpfedError(f"the plot {path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


# Okabe and Ito's eight colours without yellow, which is hard to see on white; styles tell the rest apart.
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MAX_NAMED_CLIENTS = 60
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Curve:
    """Accuracy over rounds of one method: one line of values per seed, at the same rounds."""

    name: str
    panel: str
    rounds: tuple[int, ...]
    seeds: tuple[tuple[float, ...], ...]


def accuracy_over_rounds(curves: Sequence[Curve], title: str, paths: Sequence[Path]) -> None:
    """Mean over seeds with a band from the lowest to the highest seed; one panel for each column of a preset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(curve.name for curve in curves))
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    shape = {"figsize": (6.4 if across == 1 else 4.2 * across, 4.2 * down), "layout": "constrained"}
    with pyplot.rc_context({"svg.hashsalt": "dpfed"}):  # equal studies give equal files
        figure, grid = pyplot.subplots(down, across, squeeze=False, sharey=True, **shape)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for panel, axes in zip(panels, grid.flat, strict=False):
            for curve in (c for c in curves if c.panel == panel):
                _draw(axes, curve, names.index(curve.name))
            axes.set_title(panel or title)
            axes.set_xlabel("round")
            axes.grid(alpha=0.3)
        trained = [100 * value for c in curves for line in c.seeds for value in (line[1:] or line)]
        margin = max(
            1.0, 0.05 * (max(trained) - min(trained))
        )  # round 0, before training, would flatten the rest
        for axes in grid[:, 0]:
            axes.set_ylim(max(0, min(trained) - margin), min(100, max(trained) + margin))
            axes.set_ylabel("accuracy on the test half, %")
        handles = {
            label: h
            for axes in grid.flat
            for h, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small"
        )
        for path in paths:
            figure.savefig(
                path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None
            )
        pyplot.close(figure)


def _draw(axes: Any, curve: Curve, number: int) -> None:
    values = 100 * np.asarray(curve.seeds)
    colour = COLOURS[number % len(COLOURS)]
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    axes.plot(curve.rounds, values.mean(0), style, color=colour, label=curve.name, linewidth=1.8)
    if len(values) > 1:
        axes.fill_between(
            curve.rounds, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0
        )


def label_table(
    counts: np.ndarray, classes: Sequence[str], title: str, path: Path, names: Sequence[str] = ()
) -> None:
    """Client x label as a heat map: one row for each client, one column for each class."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if path.suffix.lower() not in (".png", ".svg"):
        raise DpfedError(f"--plot {path} must end in .png or .svg")
    clients = len(counts)
    wide, high = 3.2 + 0.3 * min(len(classes), 30), 2.4 + 0.14 * min(clients, 60)
    figure, axes = pyplot.subplots(figsize=(wide, high), layout="constrained")
    # cividis reads the same with any colour vision and in grey (Nuñez, Anderton, Renslow 2018)
    image = axes.imshow(counts, aspect="auto", cmap="cividis", interpolation="nearest", vmin=0)
    figure.colorbar(image, label="training records")
    axes.set_xlabel("label")
    axes.set_ylabel("client")
    axes.set_title(title, fontsize=9)
    if len(classes) <= 30:
        axes.set_xticks(
            range(len(classes)),
            [name[:20].replace("$", r"\$") for name in classes],
            rotation=60,
            ha="right",
        )
    if 0 < len(names) <= MAX_NAMED_CLIENTS:
        axes.set_yticks(range(len(names)), [name[:20].replace("$", r"\$") for name in names])
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)
    try:
        # The counts are not noised.
        with open_private(path, "wb") as file:
            figure.savefig(file, dpi=150, format=path.suffix[1:].lower())
    except OSError as error:
        raise DpfedError(f"the plot {path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)

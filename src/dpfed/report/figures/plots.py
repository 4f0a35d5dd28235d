"""Plots as PNG or SVG, drawn with matplotlib off screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError, phrase
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.accounting.tradeoff import (
    attack_rates,
    gaussian_false_negatives,
    largest_mu,
)
from dpfed.privacy.ledger.private_files import open_private
from dpfed.privacy.published import show_delta, show_loss
from dpfed.report.measures import Measure
from dpfed.report.run_reader import over_rounds

# Seven of the eight colours by Okabe and Ito for colour-blind readers. Their yellow is left out,
# because it is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":")
MAX_NAMED_CLIENTS = 60
MAX_NAMED_CLASSES = 30
MAX_NAME_LETTERS = 20


@dataclass(frozen=True)
class Curve:
    """The score of one method over rounds, such as its accuracy, as a curve of a plot.

    name    label of the method
    panel   title of the subplot that shows the curve
    rounds  the rounds after which the score was measured
    seeds   for each seed, the score after each of `rounds`
    """

    name: str
    panel: str
    rounds: tuple[int, ...]
    seeds: tuple[tuple[float, ...], ...]


def epsilon_over_rounds(planned: Planned, path: Path) -> None:
    """Draw the planned epsilon after each round: one line for each of two observers.

    The first observer is the server, and its line is for the client with the most rounds. The other
    observer is a third party, who sees only the global models.
    """
    figure, axes = single_plot(path, (6.4, 4))
    at, server, third = over_rounds(planned)
    label = f"server, {planned.worst_client}"
    axes.plot(at, server, "-", color=COLOURS[0], label=label, linewidth=2)
    axes.plot(at, third, "--", color=COLOURS[1], label="third party", linewidth=2)
    y_label = f"epsilon at delta = {show_delta(planned.delta)}"
    axes.set(xlabel="round", ylabel=y_label, title="Privacy spent over rounds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save_private(figure, path)


def tradeoff_curve(planned: Planned, path: Path) -> None:
    """Draw a run's trade-off curve: the lowest false-negative rate for each false-positive rate.

    The rates are those of an attacker who sees everything that the server sees and guesses if a
    record was used. The curve is for the client with the largest privacy loss. Two lower bounds are
    drawn below it. One follows from epsilon and delta. The other is the curve of the Gaussian
    mechanism with the run's mu, if it has a mu.
    """
    figure, axes = single_plot(path, (5.6, 5.2), "--curve")
    histories = planned.histories
    rates = np.union1d(np.geomspace(1e-6, 1, 400), np.linspace(0, 1, 401))
    missed = 1 - np.array(attack_rates(histories, rates.tolist()))
    epsilon, delta = planned.server_worst, planned.delta
    line = np.exp(min(epsilon, 700.0))
    promised = np.maximum(0, np.maximum(1 - delta - line * rates, (1 - delta - rates) / line))
    label = f"epsilon {show_loss(epsilon)}, delta {show_delta(delta)}"
    axes.plot(rates, 1 - rates, ":", color="grey", label="guessing", linewidth=1)
    axes.plot(rates, missed, "-", color=COLOURS[0], label="this run", linewidth=2)
    mu = largest_mu(histories)
    if mu is not None and np.isfinite(mu):
        gaussian = gaussian_false_negatives(mu, rates)
        axes.plot(rates, gaussian, "-.", color=COLOURS[2], label=f"Gaussian, mu {show_loss(mu)}")
    axes.plot(rates, promised, "--", color=COLOURS[1], label=label)
    axes.set(xlabel="false-positive rate", ylabel="false-negative rate", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("The errors that every attacker must make")
    axes.grid(alpha=0.3)
    axes.legend()
    save_private(figure, path)


def label_table(
    counts: np.ndarray, classes: Sequence[str], title: str, path: Path, names: Sequence[str] = ()
) -> None:
    """Draw the table of label counts as a heat map: one row per client, one column per class."""
    width = 3.2 + 0.3 * min(len(classes), MAX_NAMED_CLASSES)
    height = 2.4 + 0.14 * min(len(counts), MAX_NAMED_CLIENTS)
    figure, axes = single_plot(path, (width, height))
    # The colour map cividis looks alike with and without colour blindness (Nuñez, Anderton, Renslow
    # 2018).
    image = axes.imshow(counts, aspect="auto", cmap="cividis", interpolation="nearest", vmin=0)
    figure.colorbar(image, label="training records")
    axes.set(xlabel="label", ylabel="client")
    axes.set_title(title, fontsize=9)
    if len(classes) <= MAX_NAMED_CLASSES:
        axes.set_xticks(range(len(classes)), _tick_labels(classes), rotation=60, ha="right")
    if 0 < len(names) <= MAX_NAMED_CLIENTS:
        axes.set_yticks(range(len(names)), _tick_labels(names))
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)
    save_private(figure, path)


def scores_over_rounds(
    curves: Sequence[Curve], title: str, measure: Measure, paths: Sequence[Path]
) -> None:
    """Draw scores over rounds with `draw_scores`, and write the plot to each of `paths`."""
    import matplotlib
    from matplotlib.figure import Figure

    # Matplotlib derives the ids inside an SVG file from this salt. With a fixed salt, equal studies
    # give identical files.
    with matplotlib.rc_context({"svg.hashsalt": "dpfed"}):
        figure = Figure(layout="constrained")
        draw_scores(figure, curves, title, measure)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=150, metadata=metadata)


def draw_scores(figure: Any, curves: Sequence[Curve], title: str, measure: Measure) -> None:
    """Draw scores over rounds: a line for the mean over seeds, and a band for all seeds.

    The band goes from the lowest to the highest seed. Curves with equal `panel` are drawn in the
    same subplot.

    figure   an empty figure of matplotlib, whose size is changed
    measure  the kind of score, such as accuracy
    """
    names = list(dict.fromkeys(curve.name for curve in curves))
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    width = 6.4 if across == 1 else 4.2 * across
    figure.set_size_inches(width, 4.2 * down)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for panel, axes in zip(panels, grid.flat, strict=False):
        for curve in curves:
            if curve.panel == panel:
                _draw_curve(axes, curve, names.index(curve.name), measure.scale)
        axes.set(title=panel or title, xlabel="round")
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set(ylim=_limits(curves, measure), ylabel=measure.label("on the test half"))
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        drawn, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    place = {"loc": "outside lower center", "ncols": 3, "fontsize": "small"}
    figure.legend(handles.values(), handles.keys(), **place)


def _limits(curves: Sequence[Curve], measure: Measure) -> tuple[float, float]:
    """Return the lower and the upper end of a plot's axis that shows scores.

    Round 0 is left out, because its low score would flatten the curves.
    """
    scale = measure.scale
    trained = [scale * value for c in curves for line in c.seeds for value in (line[1:] or line)]
    margin = max(0.01 * scale, 0.05 * (max(trained) - min(trained)))
    return max(measure.lowest, min(trained) - margin), min(scale, max(trained) + margin)


def _draw_curve(axes: Any, curve: Curve, number: int, scale: float) -> None:
    values = scale * np.asarray(curve.seeds)
    colour = COLOURS[number % len(COLOURS)]
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    axes.plot(curve.rounds, values.mean(0), style, color=colour, label=curve.name, linewidth=1.8)
    if len(values) > 1:
        band = {"color": colour, "alpha": 0.15, "linewidth": 0}
        axes.fill_between(curve.rounds, values.min(0), values.max(0), **band)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def single_plot(path: Path, inches: tuple[float, float], option: str = "") -> Any:
    """Return a matplotlib figure and its axes; refuse a `path` that is neither .png nor .svg.

    option  name of the option that gave `path`, for the error message; "" for the option --plot
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise DpfedError(f"{option or phrase('plot')} {path} must end in .png or .svg")
    return _pyplot().subplots(figsize=inches, layout="constrained")


def _tick_labels(names: Sequence[str]) -> list[str]:
    """Return shortened names with $ escaped, because matplotlib begins a formula at a $."""
    return [name[:MAX_NAME_LETTERS].replace("$", r"\$") for name in names]


def save_private(figure: Any, path: Path) -> None:
    """Write a plot to a file that only its owner may read, because plots may show exact counts."""
    try:
        with open_private(path, "wb") as file:
            figure.savefig(file, dpi=150, format=path.suffix[1:].lower())
    except OSError as error:
        raise DpfedError(f"the plot {path} cannot be written: {error.strerror or error}") from None
    finally:
        _pyplot().close(figure)

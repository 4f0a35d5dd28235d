"""A plot of one run for a notebook: its main score over the rounds, and its epsilon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpfed.privacy.published import show_delta
from dpfed.report.figures.plots import COLOURS

if TYPE_CHECKING:
    import pandas

LINES = (
    ("epsilon_server_worst", "server", "-"),
    ("epsilon_third_party", "third party", "--"),
)


def run_plot(history: pandas.DataFrame, delta: float | None) -> Any:
    """Draw a run's main score and its epsilon over the rounds; return the two matplotlib axes.

    history  a table with a row for each round, and columns such as "accuracy"
    delta    delta of the privacy guarantee; None without privacy
    """
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    name, scale, unit = "accuracy", 100, ", %"
    other = next((column for column in ("perplexity", "r2") if column in history), None)
    if other is not None:
        name, scale, unit = other, 1, ""
    scored = history[name].dropna()
    if len(scored):
        left.plot(scored.index, scale * scored, "-o", color=COLOURS[0], markersize=3)
    left.set(xlabel="round", ylabel=f"{name} on the test set{unit}")
    for i, (column, label, style) in enumerate(LINES):
        points = history[column].dropna()
        if len(points):
            right.plot(points.index, points, style, color=COLOURS[i], label=label)
    if right.lines:
        right.legend()
        right.set_ylim(bottom=0)
    stated = "no privacy" if delta is None else f"epsilon at delta = {show_delta(delta)}"
    right.set(xlabel="round", ylabel=stated)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return left, right

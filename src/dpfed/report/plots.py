"""Plots as PNG or SVG, drawn with matplotlib off screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.statement import Planned

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
    axes.set_ylabel(f"epsilon at delta = {planned.delta:g}")
    axes.set_title("Privacy spent over rounds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DpfedError(f"the plot {path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def label_table(counts: np.ndarray, classes: Sequence[str], title: str, path: Path) -> None:
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
            range(len(classes)), [name[:20].replace("$", r"\$") for name in classes], rotation=60, ha="right"
        )
    axes.yaxis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DpfedError(f"the plot {path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)

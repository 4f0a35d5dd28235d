"""The plot of `dpfed plan`: noise over batch size, with one line for each way to draw cohorts."""

from __future__ import annotations

from pathlib import Path

from dpfed.privacy.planning.federation import FederationPlan
from dpfed.privacy.published import show_setting
from dpfed.report.figures.plots import COLOURS, STYLES, save_private, single_plot


def noise_over_batch(plan: FederationPlan, path: Path) -> None:
    """Draw the noise of the whole run over the batch size, and mark the recommended plan."""
    federation = plan.federation
    figure, axes = single_plot(path, (6.4, 4))
    for number, cohorts in enumerate(dict.fromkeys(choice.cohorts for choice in plan.choices)):
        points = [(c.batch, c.noise) for c in plan.choices if c.cohorts == cohorts]
        style = f"{STYLES[number]}o"
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[number], label=cohorts)
    own = plan.recommended
    axes.plot([own.batch], [own.noise], "D", color=COLOURS[2], markersize=9, label="recommended")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(
        xlabel="expected batch of a client",
        ylabel="noise on one coordinate, in units of C",
        title=f"Noise at epsilon {show_setting(federation.epsilon)}, {federation.clients} clients",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_private(figure, path)

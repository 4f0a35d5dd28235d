"""The tables of studies of language models: perplexity and exact match in place of accuracy."""

from __future__ import annotations

from results_specs import named
from results_studies import LANGUAGE, RATES, Rows

from dpfed.privacy.published import show_loss, show_perplexity
from dpfed.report.measures import ACCURACY
from dpfed.report.tables import size


def is_language(runs: Rows) -> bool:
    """Return True if these are runs of language models."""
    return any(run["perplexity"] for run in runs)


def language_cells(arms: Rows, runs: Rows) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of a study of language models."""
    with_words = any(run["exact_match"] for run in runs)
    with_range = any(int(arm["n"] or 0) > 1 for arm in arms)
    head = ["method", "rate", "inside the grid", "before", "perplexity"]
    head += ["of the seeds"] * with_range
    head += ["exact match %"] * with_words
    head += ["seeds", "ε server", "up"]
    body = []
    for arm in arms:
        mine = [r for r in runs if r["arm"] == arm["arm"] and r["phase"] == "reported"]
        before, after, exact = (mean_of(mine, name) for name in LANGUAGE)
        epsilon = arm["epsilon_server_worst"]
        line = [
            named(arm["arm"]),
            " ".join(f"{key} {float(arm[key]):g}" for key in RATES if arm[key]) or "–",
            arm["inside_grid"] or "–",
            "–" if before is None else show_perplexity(before),
            "–" if after is None else show_perplexity(after),
        ]
        line += [range_of(mine, "perplexity")] * with_range
        line += [ACCURACY.shown(exact, None)] * with_words
        spent = show_loss(float(epsilon), 2) if epsilon else "no privacy"
        line += [arm["n"] or "0", spent if mine else "–"]
        body.append([*line, size(int(arm["up_bytes"])) if arm["up_bytes"] else "–"])
    return head, body


def range_of(runs: Rows, name: str) -> str:
    """Return the lowest and the highest value of a column of runs, as a text."""
    values = [float(run[name]) for run in runs if run[name]]
    if not values:
        return "–"
    return f"{show_perplexity(min(values))} to {show_perplexity(max(values))}"


def mean_of(runs: Rows, name: str) -> float | None:
    """Return the mean of a column of runs; None if a run has no value."""
    values = [float(run[name]) for run in runs if run[name]]
    return sum(values) / len(values) if values and len(values) == len(runs) else None

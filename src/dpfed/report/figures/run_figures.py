"""All figures of the HTML report: training, comparisons, data, communication, diagnostics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfed.report.figures.figure import ROUNDS, Figure, axis, band, bars, inert, line
from dpfed.report.figures.privacy_figures import (
    accuracy_against_epsilon,
    client_names,
    clients_epsilon,
    epsilon_over_rounds,
)
from dpfed.report.run_reader import Group, number
from dpfed.report.tables import Table

# Largest number of cells of a heat map that browsers draw without delay.
MAX_CELLS = 20_000
MAX_NAME_LETTERS = 24
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
WAYS = (("up, client to server", "up_bytes"), ("down, server to client", "down_bytes"))


def all_figures(groups: Sequence[Group], tables: Sequence[Table]) -> list[Figure]:
    traffic = known_traffic(groups)
    found = [
        *(over_rounds(groups, curve) for curve in TRAINING),
        epsilon_over_rounds(groups),
        accuracy_against_epsilon(groups),
        clients_epsilon(groups),
        *(along_axis(table, i) for i, table in enumerate(tables)),
        label_map(groups),
        bytes_per_round(traffic),
        accuracy_against_bytes(traffic),
        *(over_rounds(groups, curve) for curve in DIAGNOSTICS),
        histogram(groups, "sqrt_v_histogram", "sqrt-v", "√v"),
        histogram(groups, "abs_m_histogram", "abs-m", "|m|"),
    ]
    return [figure for figure in found if figure is not None and figure.rows]


@dataclass(frozen=True)
class Measured:
    """A measured value that a figure draws over rounds, with the title and texts of this figure.

    key    name of the value in the metrics or the diagnostics of a run
    scale  factor from the stored value to the drawn value
    """

    key: str
    id: str
    section: str
    title: str
    unit: str
    caption: str
    scale: float = 1.0


TEST_SET = "On the server's public test set; round 0 is before training."
TRAINING = (
    Measured(
        "accuracy", "accuracy", "training", "Accuracy over rounds", "accuracy, %", TEST_SET, 100
    ),
    Measured("r2", "r2", "training", "R2 over rounds", "R2", TEST_SET),
    Measured("loss", "loss", "training", "Loss over rounds", "loss, nats", TEST_SET),
)
DIAGNOSTICS = (
    Measured(
        key="v_relative_variance",
        id="spread",
        section="diagnostics",
        title="Spread of v between clients",
        unit="variance over clients / mean square",
        caption="How far the clients' second moments are apart, relative to their size.",
    ),
    Measured(
        key="drift",
        id="drift",
        section="diagnostics",
        title="Client drift",
        unit="distance from the mean client",
        caption="Root mean square distance of the clients' models from their mean at the end of a "
        "round.",
    ),
)


def over_rounds(groups: Sequence[Group], curve: Measured) -> Figure:
    """Return the figure of a measured value over rounds: one line per method.

    The line is the mean over seeds. A band shows the range from the lowest to the highest seed.
    """
    is_training = curve.section == "training"
    traces, rows = [], []
    most_seeds = 1
    for i, group in enumerate(groups):
        at, values = group.bands(curve.key, diagnostics=not is_training)
        if not at:
            continue
        values = curve.scale * values
        most_seeds = max(most_seeds, len(values))
        if len(values) > 1:
            traces.append(band(at, values, i))
        mean = values.mean(0).tolist()
        traces.append(line(at, mean, group.label, i))
        columns = [mean, values.min(0).tolist(), values.max(0).tolist()][: 3 if is_training else 1]
        rows += [[group.label, *row] for row in zip(at, *columns, strict=True)]
    caption = curve.caption
    y_axis = axis(curve.unit, rangemode="tozero")
    head = ["method", "round", curve.unit]
    if is_training:
        y_axis = axis(curve.unit)
        head = ["method", "round", f"{curve.unit}, mean", "lowest seed", "highest seed"]
        if most_seeds > 1:
            caption += " The line is the mean over seeds, the band goes from the lowest to the "
            caption += "highest seed."
    fixed = (curve.id, curve.section, curve.title, caption, axis(ROUNDS), y_axis)
    return Figure(*fixed, traces, head, rows)


def label_map(groups: Sequence[Group]) -> Figure | None:
    """Return a heat map of the number of training records of each label at each client.

    The map shows the first run that recorded these numbers. Return None if no run recorded them.
    """
    run = next((run for group in groups for run in group.runs if run.label_counts), None)
    if run is None or run.label_counts is None:
        return None
    counts = np.asarray(run.label_counts["labels"])
    classes = run.label_counts["classes"]
    clients = client_names(run, len(counts))
    shown = counts[: max(1, MAX_CELLS // max(1, len(classes)))]
    names = [inert(name[:MAX_NAME_LETTERS]) for name in classes]
    names_differ = len(set(names)) == len(names)
    gap = 1 if len(shown) <= 100 else 0
    trace = {
        "type": "heatmap",
        "z": shown.tolist(),
        "x": names if names_differ else list(range(len(classes))),
        "y": [inert(name) if isinstance(name, str) else name for name in clients[: len(shown)]],
        "colorscale": "Cividis",
        "zmin": 0,
        "xgap": gap,
        "ygap": gap,
        "colorbar": {
            "title": {"text": "records", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
        "hovertemplate": "client %{y}, label %{x}: %{z} records<extra></extra>",
        "meta": {"series": 0, "role": "map"},
    }
    left = ""
    if len(shown) < len(counts):
        left = f" The first {len(shown)} of {len(counts)} clients are drawn."
    by_name = {"type": "category"} if isinstance(clients[0], str) else {}
    return Figure(
        id="labels",
        section="clients",
        title="Who holds which labels",
        caption=f"Training records of each label at each client, first run.{left} "
        "Counts of private labels without noise: for the operator only.",
        x=axis("label", type="category"),
        y=axis("client", autorange="reversed", **by_name),
        traces=[trace],
        head=["client", *classes],
        rows=[[client, *row] for client, row in zip(clients, counts.tolist(), strict=True)],
        wide=True,
        height=200 + min(520, max(140, 12 * len(shown))),
    )


Traffic = Sequence[tuple[int, Group, Mapping[str, Any]]]
"""(number, group, bytes that one client sends and receives in a round) of each method."""


def known_traffic(groups: Sequence[Group]) -> Traffic:
    found = []
    for i, group in enumerate(groups):
        traffic = group.first("traffic")
        if isinstance(traffic, dict) and None not in [number(traffic.get(key)) for _, key in WAYS]:
            found.append((i, group, traffic))
    return found


def bytes_per_round(known: Traffic) -> Figure | None:
    if not known:
        return None
    names = [inert(group.label) for _, group, _ in known]
    rows = [[group.label, t["up_bytes"], t["down_bytes"]] for _, group, t in known]
    most = max(max(row[1:]) for row in rows)
    unit, scale = next(((u, s) for u, s in UNITS if most >= s), UNITS[-1])
    traces = [
        bars([t[key] / scale for _, _, t in known], names, word, series, orientation="h")
        for series, (word, key) in enumerate(WAYS)
    ]
    return Figure(
        id="traffic",
        section="communication",
        title="Sent and received",
        caption="What one client sends and receives in one round; a handful of numbers that steer "
        "the round is not counted.",
        x=axis(f"{unit} for each client and round", rangemode="tozero"),
        y={"automargin": True, "autorange": "reversed", "type": "category", "ticklabelstandoff": 6},
        traces=traces,
        head=["method", "bytes up", "bytes down"],
        rows=rows,
        more={"barmode": "group"},
        height=190 + 44 * len(known),
    )


def accuracy_against_bytes(known: Traffic) -> Figure:
    traces, rows = [], []
    for i, group, traffic in known:
        at, values = group.bands("accuracy")
        clients = number(group.first("clients"))
        share = number(group.settings.get("run", {}).get("participation"))
        if not at or clients is None or share is None:
            continue
        # Use the planned size of a cohort, because the number of clients that really took part is
        # private.
        cohort = max(1, round(share * clients))
        each = cohort * (traffic["up_bytes"] + traffic["down_bytes"]) / 1e6
        x = [t * each for t in at]
        y = (100 * values.mean(0)).tolist()
        traces.append(line(x, y, group.label, i))
        rows += [[group.label, *row] for row in zip(at, x, y, strict=True)]
    return Figure(
        id="volume",
        section="communication",
        title="Accuracy against communication",
        caption="All clients of the planned cohorts together, both ways (mean over seeds). "
        "Up and left is better.",
        x=axis("MB sent and received in all", rangemode="tozero"),
        y=axis("accuracy, %"),
        traces=traces,
        head=["method", "round", "MB in all", "accuracy, %"],
        rows=rows,
    )


def along_axis(table: Table, index: int) -> Figure | None:
    """Return the figure of the score over the setting that differs between the columns of a table.

    Return None if no setting varies, or if the table has a single column.

    index  number of the table on the page, from 0
    """
    columns = list(dict.fromkeys(row.column for row in table.rows))
    if not table.axis or len(columns) < 2:
        return None
    scale = table.measure.scale
    traces: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    for i, name in enumerate(dict.fromkeys(row.row for row in table.rows)):
        mine = [row for row in table.rows if row.row == name and row.mean is not None]
        means = [scale * (row.mean or 0.0) for row in mine]
        spread = [scale * (row.std or 0.0) for row in mine]
        trace = line([inert(row.column) for row in mine], means, name, i)
        error = {"type": "data", "array": spread, "thickness": 1, "width": 4}
        traces.append({**trace, "marker": {"maxdisplayed": 0}, "error_y": error})
        rows += [[name, r.column, m, s] for r, m, s in zip(mine, means, spread, strict=True)]
    categories = [inert(column) for column in columns]
    return Figure(
        id=f"axis-{index}",
        section="comparison",
        title=f"{table.measure.title} against {table.axis}",
        caption="Mean over seeds at each method's best learning rate; bars are one standard "
        "deviation over seeds.",
        x=axis(inert(table.axis), type="category", categoryorder="array", categoryarray=categories),
        y=axis(table.measure.label()),
        traces=traces,
        head=["method", table.axis, table.measure.label(), "standard deviation"],
        rows=rows,
        wide=True,
    )


def histogram(groups: Sequence[Group], key: str, id: str, unit: str) -> Figure:
    """Return the figure of one of the histograms that runs write to their files of diagnostics.

    An example is the histogram of √v, where v are the second moments of the optimizer. The figure
    shows the first run of each method. With several methods, it shows the last recorded round of
    each method. With one method, it shows all recorded rounds.

    key   name of the histogram in the diagnostics
    unit  the quantity whose values are counted, such as "√v", for titles
    """
    recorded = [(i, g) for i, g in enumerate(groups) if any(run.diagnostics for run in g.runs)]
    is_alone = len(recorded) == 1
    traces, rows = [], []
    marks: list[dict[str, Any]] = []
    for i, group in recorded:
        diagnostics = group.runs[0].diagnostics
        found = [row for row in diagnostics if isinstance(row.get(key), list) and any(row[key])]
        for j, row in enumerate(found if is_alone else found[-1:]):
            at, share = _shares(row, key)
            name = f"round {row['round']}"
            if not is_alone:
                name = f"{group.label}, {name}"
            traces.append({**line(at, share, name, i + j, shape="hvh"), "mode": "lines"})
            rows += [[group.label, row["round"], *pair] for pair in zip(at, share, strict=True)]
            noise = number(row.get("noise_std"))
            if noise and key.startswith("sqrt_v") and not marks:
                marks.append({"value": noise, "text": "noise alone", "way": "x"})
    return Figure(
        id=id,
        section="diagnostics",
        title=f"Histogram of {unit}",
        caption=f"Share of coordinates by the size of {unit}, over the clients of a round "
        "(first run).",
        x=axis(f"{unit}, logarithmic", type="log", exponentformat="power"),
        y=axis("coordinates, %", rangemode="tozero"),
        traces=traces,
        head=["method", "round", unit, "coordinates, %"],
        rows=rows,
        more={"marks": marks},
    )


def _shares(row: Mapping[str, Any], key: str) -> tuple[list[float], list[float]]:
    """Return the middle of each bin of a histogram, and each bin's share of the values in per cent.

    At both ends, all empty bins except four are left out.

    row  the diagnostics of one round
    key  name of the histogram in `row`
    """
    counts = np.nan_to_num(np.asarray(row[key], dtype=float))
    low, high = (float(v) for v in row.get("histogram_log10") or (-9, 1))
    at = 10 ** (low + (high - low) * (np.arange(len(counts)) + 0.5) / len(counts))
    filled = counts.nonzero()[0]
    cut = slice(max(0, int(filled.min()) - 4), int(filled.max()) + 5)
    return at[cut].tolist(), (100 * counts / counts.sum())[cut].tolist()

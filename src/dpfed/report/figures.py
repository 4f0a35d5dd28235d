"""The figures of a page as data: what is drawn, with labels and units, a sentence for each, and the numbers behind it.

A trace carries in `meta` which series it is and what role it plays; colours, dashes and markers are given by the page,
which knows whether it is light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpfed.privacy.published import PLOTTED_DIGITS, plotted_loss, show_delta, show_setting
from dpfed.report.run_reader import Group, Privacy, RunData, number
from dpfed.report.study_reader import Listing

Trace = dict[str, Any]
ROUNDS = "round"
NEUTRAL = (6, 2, 3)  # series of the views, in colours that the first two methods do not have
MOST_CELLS = 20_000  # of a heat map that a browser draws without effort


@dataclass(frozen=True)
class Figure:
    """head and rows are its numbers, for the table below it and for CSV; wide: it takes the whole width of the page."""

    id: str
    section: str
    title: str
    caption: str
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    traces: Sequence[Trace]
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    more: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = False
    height: int = 340

    def plain(self) -> dict[str, Any]:
        return {
            "data": list(self.traces),
            "layout": {"xaxis": dict(self.x), "yaxis": dict(self.y), **self.more},
            "height": self.height,
            "wide": self.wide,
            "name": self.id,
            "head": list(self.head),
            "rows": [list(row) for row in self.rows],
        }


def short(delta: float) -> str:
    """1e-5, not 1e-05."""
    return show_delta(delta).replace("e-0", "e-")


def epsilon_axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis whose hover labels keep every digit of `plotted_loss`."""
    return axis(title, hoverformat=f".{PLOTTED_DIGITS}~r", **more)


def losses(values: Iterable[float]) -> list[float]:
    return [plotted_loss(value) for value in values]


def joined(names: Sequence[str]) -> str:
    """All of a few names, the first of many."""
    return " and ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def inert(text: str) -> str:
    """Plotly reads a little HTML in names and labels; these are words."""
    return html.escape(str(text), quote=False)


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def _line(x: Sequence[float], y: Sequence[float], name: str, series: int, **meta: Any) -> Trace:
    few = len(x) <= 12
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(x),
        "y": list(y),
        "name": inert(name),
        "legendgroup": str(series),
        "marker": {"maxdisplayed": 0 if few else 8},
        "meta": {"series": series, "role": "line", **meta},
    }


def _band(x: Sequence[int], low: Sequence[float], high: Sequence[float], series: int) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": str(series),
        "meta": {"series": series, "role": "band"},
    }


def over_rounds(
    groups: Sequence[Group], key: str, fig: str, title: str, unit: str, scale: float = 1.0
) -> Figure | None:
    """The mean over seeds with a band from the lowest to the highest."""
    traces, rows, seeds = [], [], 1
    for i, group in enumerate(groups):
        at, values = group.bands(key)
        if not at:
            continue
        values = scale * values
        mean, low, high = values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()
        seeds = max(seeds, len(values))
        if len(values) > 1:
            traces.append(_band(at, low, high, i))
        traces.append(_line(at, mean, group.label, i))
        rows += [[group.label, t, m, a, b] for t, m, a, b in zip(at, mean, low, high, strict=True)]
    if not traces:
        return None
    band = (
        "The line is the mean over seeds, the band goes from the lowest to the highest seed."
        if seeds > 1
        else ""
    )
    caption = f"On the server's public test set; round 0 is before training. {band}".strip()
    head = ["method", "round", f"{unit}, mean", "lowest seed", "highest seed"]
    return Figure(fig, "training", title, caption, axis(ROUNDS), axis(unit), traces, head, rows)


def training(groups: Sequence[Group]) -> list[Figure | None]:
    return [
        over_rounds(groups, "accuracy", "accuracy", "Accuracy over rounds", "accuracy, %", 100),
        over_rounds(groups, "loss", "loss", "Loss over rounds", "loss, nats"),
    ]


def plans(groups: Sequence[Group]) -> list[tuple[str, Group, Privacy]]:
    """Each different plan once, with the names of those that follow it."""
    found: dict[Any, tuple[list[str], Group, Privacy]] = {}
    for group in groups:
        if group.privacy is not None:
            key = (group.privacy.planned, group.privacy.void, _limit(group))
            found.setdefault(key, ([], group, group.privacy))[0].append(group.label)
    if len(found) == 1:
        return [("", group, privacy) for _, group, privacy in found.values()]
    return [(joined(names), group, privacy) for names, group, privacy in found.values()]


def _limit(group: Group) -> tuple[str, float] | None:
    section = group.settings.get("privacy", {})
    for key, word in (("budget", "budget"), ("target_epsilon", "target")):
        if (value := number(section.get(key))) is not None:
            return word, value
    return None


def epsilon_over_rounds(groups: Sequence[Group]) -> Figure | None:
    """Both views of the plan; on the operator's page also what was really spent."""
    traces, rows, shapes, notes = [], [], [], []
    found = plans(groups)
    for series, (name, group, privacy) in enumerate(found):
        at, *views_over_rounds = privacy.over_rounds()
        server, third = map(losses, views_over_rounds)
        end = f" ({name})" if name else ""
        views = [
            ("server, a client in every round", server, "solid"),
            ("third party", third, "dash"),
        ]
        for word, values, dash in views:
            colour = series if name else NEUTRAL[dash == "dash"]
            traces.append(
                _line([0, *at], [_before(privacy), *values], word + end, colour, dash=dash)
            )
            rows += [[word + end, t, value] for t, value in zip(at, values, strict=True)]
        # A public page has no such curve.
        spent = {t: plotted_loss(e) for t, e in group.runs[0].curve("epsilon_server_max").items()}
        if spent and not name:
            traces.append(
                _line(
                    list(spent),
                    list(spent.values()),
                    "client that spent most so far",
                    NEUTRAL[2],
                    dash="dot",
                )
            )
            rows += [["client that spent most so far", t, value] for t, value in spent.items()]
        limit = _limit(group)
        if limit is not None and limit not in notes:
            notes.append(limit)
            shapes.append({"value": limit[1], "text": f"{limit[0]} {show_setting(limit[1])}"})
    if not traces:
        return None
    delta = found[0][2].planned.delta
    caption = (
        "What the plan allows after each round. The server sees every message and who took part; a third party sees only "
        "the global models, and not who took part. Smaller is more private."
    )
    if len(found[0][2].over_rounds()[0]) < found[0][2].planned.rounds:
        caption += f" Computed at {len(found[0][2].over_rounds()[0])} rounds and joined by lines."
    y = epsilon_axis(f"epsilon at δ = {short(delta)}", rangemode="tozero")
    head = ["view", "round", "epsilon"]
    more = {"marks": shapes}
    return Figure(
        "epsilon",
        "privacy",
        "Epsilon over rounds",
        caption,
        axis(ROUNDS),
        y,
        traces,
        head,
        rows,
        more,
    )


def _before(privacy: Privacy) -> float:
    return plotted_loss(privacy.planned.server(0)) if privacy.planned.prior else 0.0


def accuracy_against_epsilon(groups: Sequence[Group]) -> Figure | None:
    traces, rows = [], []
    for i, group in enumerate(groups):
        at, values = group.bands("accuracy")
        if not at or group.privacy is None:
            continue
        mean = dict(zip(at, (100 * values.mean(0)).tolist(), strict=True))
        rounds, server, _ = group.privacy.over_rounds()
        points = [(t, e, mean[t]) for t, e in zip(rounds, losses(server), strict=True) if t in mean]
        if points:
            traces.append(
                _line([e for _, e, _ in points], [a for _, _, a in points], group.label, i)
            )
            traces[-1]["text"] = [f"round {t}" for t, _, _ in points]
            rows += [[group.label, t, e, a] for t, e, a in points]
    if not traces:
        return None
    caption = "Round by round, for a client in every one of them (mean over seeds). Up and left is better."
    x, y = epsilon_axis("epsilon, server's view", rangemode="tozero"), axis("accuracy, %")
    head = ["method", "round", "epsilon", "accuracy, %"]
    return Figure(
        "tradeoff", "privacy", "Accuracy against epsilon", caption, x, y, traces, head, rows
    )


def clients_epsilon(groups: Sequence[Group]) -> Figure | None:
    """A histogram over clients, of each group's first run; methods with the same cohorts are drawn once."""
    found: dict[tuple[float, ...], list[str]] = {}
    clients: dict[str, list[str] | list[int]] = {}
    for group in groups:
        if group.privacy and group.privacy.epsilons:
            found.setdefault(group.privacy.epsilons, []).append(group.label)
            clients[group.label] = client_names(group.runs[:1], len(group.privacy.epsilons))
    top = max((max(each) for each in found), default=0.0)
    edges = np.linspace(0, top * 1.0001 or 1.0, 25)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    traces, rows = [], []
    for i, (each, names) in enumerate(found.items()):
        counts, _ = np.histogram(each, edges)
        meta = {"series": i, "role": "bar"}
        name = inert(joined(names))
        traces.append(
            {"type": "bar", "x": middle, "y": counts.tolist(), "name": name, "meta": meta}
        )
        for label in names:
            rows += [[label, *row] for row in zip(clients[label], losses(each), strict=True)]
    if not traces:
        return None
    caption = (
        "What the server has learned of each client so far, by the rounds it really took part in (first run of each "
        "method). For the operator only: published, it would void the third party's figure."
    )
    x, y = axis("epsilon of a client, server's view", range=[0, top * 1.04 or 1.0]), axis("clients")
    more = {"barmode": "group", "bargap": 0.08}
    title, head = "Epsilon of every client", ["method", "client", "epsilon"]
    return Figure("clients", "privacy", title, caption, x, y, traces, head, rows, more)


def client_names(runs: Sequence[RunData], count: int) -> list[str] | list[int]:
    """Return the names of the first run's clients, their numbers where it has no names."""
    names = runs[0].result.get("client_names") if runs else None
    if isinstance(names, list) and len({str(name) for name in names}) == count == len(names):
        return [str(name) for name in names]
    return list(range(count))


def label_map(groups: Sequence[Group]) -> Figure | None:
    """Client x label of the first run that recorded it."""
    recorded = next((run for group in groups for run in group.runs if run.holdings), None)
    if recorded is None or recorded.holdings is None:
        return None
    held = recorded.holdings
    counts, classes = np.asarray(held["labels"]), held["classes"]
    clients = client_names([recorded], len(counts))
    shown = counts[: max(1, MOST_CELLS // max(1, len(classes)))]
    names = [inert(name[:24]) for name in classes]
    trace = {
        "type": "heatmap",
        "z": shown.tolist(),
        "x": names if len(set(names)) == len(names) else list(range(len(classes))),
        "y": [inert(name) if isinstance(name, str) else name for name in clients[: len(shown)]],
        "colorscale": "Cividis",
        "zmin": 0,
        "xgap": 1 if len(shown) <= 100 else 0,
        "ygap": 1 if len(shown) <= 100 else 0,
        "colorbar": {
            "title": {"text": "records", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
        "hovertemplate": "client %{y}, label %{x}: %{z} records<extra></extra>",
        "meta": {"series": 0, "role": "map"},
    }
    left = (
        f" The first {len(shown)} of {len(counts)} clients are drawn."
        if len(shown) < len(counts)
        else ""
    )
    caption = (
        f"Training records of each label at each client, first run.{left} Counts of private labels without noise: for the "
        "operator only."
    )
    x = axis("label", type="category")
    named = {"type": "category"} if isinstance(clients[0], str) else {}
    y = axis("client", autorange="reversed", **named)
    rows = [[client, *row] for client, row in zip(clients, counts.tolist(), strict=True)]
    height = 200 + min(520, max(140, 12 * len(shown)))
    title, head = "Who holds which labels", ["client", *classes]
    return Figure(
        "labels", "clients", title, caption, x, y, [trace], head, rows, wide=True, height=height
    )


def communication(groups: Sequence[Group]) -> list[Figure | None]:
    known = [(i, g, t) for i, g in enumerate(groups) if isinstance(t := g.first("traffic"), dict)]
    known = [
        (i, g, t)
        for i, g, t in known
        if all(number(t.get(k)) is not None for k in ("up_bytes", "down_bytes"))
    ]
    if not known:
        return [None]
    names = [inert(group.label) for _, group, _ in known]
    most = max(max(t["up_bytes"], t["down_bytes"]) for _, _, t in known)
    unit, scale = next(
        ((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if most >= s), ("bytes", 1.0)
    )
    traces: list[Trace] = []
    for series, (word, key) in enumerate(
        (("up, client to server", "up_bytes"), ("down, server to client", "down_bytes"))
    ):
        values = [traffic[key] / scale for _, _, traffic in known]
        meta = {"series": series, "role": "bar"}
        traces.append(
            {"type": "bar", "orientation": "h", "y": names, "x": values, "name": word, "meta": meta}
        )
    rows = [[g.label, t["up_bytes"], t["down_bytes"]] for _, g, t in known]
    caption = "What one client sends and receives in one round; a handful of numbers that steer the round is not counted."
    y = {"automargin": True, "autorange": "reversed", "type": "category", "ticklabelstandoff": 6}
    head = ["method", "bytes up", "bytes down"]
    height = 190 + 44 * len(known)
    x = axis(f"{unit} for each client and round", rangemode="tozero")
    bars = Figure(
        "traffic", "communication", "Sent and received", caption, x, y, traces, head, rows, {"barmode": "group"},
        height=height,
    )  # fmt: skip
    return [bars, _against_traffic(known)]


def _against_traffic(known: Sequence[tuple[int, Group, Mapping[str, Any]]]) -> Figure | None:
    traces, rows = [], []
    for i, group, traffic in known:
        at, values = group.bands("accuracy")
        run = group.settings.get("run", {})
        clients, share = number(group.first("clients")), number(run.get("participation"))
        if not at or clients is None or share is None:
            continue
        cohort = max(
            1, round(share * clients)
        )  # the plan's, so that nothing of who really took part is in it
        each = cohort * (traffic["up_bytes"] + traffic["down_bytes"]) / 1e6
        x, y = [t * each for t in at], (100 * values.mean(0)).tolist()
        traces.append(_line(x, y, group.label, i))
        rows += [[group.label, t, a, b] for t, a, b in zip(at, x, y, strict=True)]
    if not traces:
        return None
    caption = "All clients of the planned cohorts together, both ways (mean over seeds). Up and left is better."
    head = ["method", "round", "MB in all", "accuracy, %"]
    x_axis, y_axis = axis("MB sent and received in all", rangemode="tozero"), axis("accuracy, %")
    title = "Accuracy against communication"
    return Figure("volume", "communication", title, caption, x_axis, y_axis, traces, head, rows)


def along_axis(listing: Listing, number_of: int) -> Figure | None:
    """For an ablation over a setting: accuracy at each of its values."""
    if not listing.axis:
        return None
    columns = list(dict.fromkeys(entry.row.column for entry in listing.entries))
    traces, rows = [], []
    for i, name in enumerate(dict.fromkeys(entry.row.row for entry in listing.entries)):
        mine = [e.row for e in listing.entries if e.row.row == name and e.row.mean is not None]
        x, y = [inert(row.column) for row in mine], [100 * (row.mean or 0.0) for row in mine]
        trace = _line([], [], name, i)
        spread = [100 * (row.std or 0.0) for row in mine]
        trace |= {
            "x": x,
            "y": y,
            "error_y": {"type": "data", "array": spread, "thickness": 1, "width": 4},
        }
        traces.append(trace)
        rows += [[name, row.column, a, s] for row, a, s in zip(mine, y, spread, strict=True)]
    if not rows or len(columns) < 2:
        return None
    x_axis = axis(
        inert(listing.axis),
        type="category",
        categoryorder="array",
        categoryarray=[inert(c) for c in columns],
    )
    caption = "Mean over seeds at each method's best learning rate; bars are one standard deviation over seeds."
    head = ["method", listing.axis, "accuracy, %", "standard deviation"]
    title, fig = f"Accuracy against {listing.axis}", f"axis-{number_of}"
    return Figure(
        fig,
        "comparison",
        title,
        caption,
        x_axis,
        axis("accuracy, %"),
        traces,
        head,
        rows,
        wide=True,
    )


def diagnostics(groups: Sequence[Group]) -> list[Figure | None]:
    recorded = [
        (i, group) for i, group in enumerate(groups) if any(run.diagnostics for run in group.runs)
    ]
    if not recorded:
        return []
    return [
        _measured(recorded, "v_relative_variance", "spread", "Spread of v between clients",
                  "variance over clients / mean square", "How far the clients' second moments are apart, relative to their size."),
        _measured(recorded, "drift", "drift", "Client drift", "distance from the mean client",
                  "Root mean square distance of the clients' models from their mean at the end of a round."),
        _histogram(recorded, "sqrt_v_histogram", "sqrt-v", "Histogram of √v", "√v"),
        _histogram(recorded, "abs_m_histogram", "abs-m", "Histogram of |m|", "|m|"),
    ]  # fmt: skip


def _measured(
    recorded: Sequence[tuple[int, Group]], key: str, fig: str, title: str, unit: str, said: str
) -> Figure | None:
    traces, rows = [], []
    for i, group in recorded:
        curves = [
            {int(r["round"]): v for r in run.diagnostics if (v := number(r.get(key))) is not None}
            for run in group.runs
        ]
        full = [curve for curve in curves if curve and len(curve) == max(map(len, curves))]
        at = sorted(set.intersection(*map(set, full))) if full else []
        if not at:
            continue
        values = np.array([[curve[t] for t in at] for curve in full])
        if len(values) > 1:
            traces.append(_band(at, values.min(0).tolist(), values.max(0).tolist(), i))
        mean = values.mean(0).tolist()
        traces.append(_line(at, mean, group.label, i))
        rows += [[group.label, t, v] for t, v in zip(at, mean, strict=True)]
    if not traces:
        return None
    y = axis(unit, rangemode="tozero")
    return Figure(
        fig, "diagnostics", title, said, axis(ROUNDS), y, traces, ["method", "round", unit], rows
    )


def _histogram(
    recorded: Sequence[tuple[int, Group]], key: str, fig: str, title: str, unit: str
) -> Figure | None:
    """Of the last round that has one, for each group; of a single group all recorded rounds."""
    traces, rows, alone = [], [], len(recorded) == 1
    marks: list[dict[str, Any]] = []
    for i, group in recorded:
        found = [
            row
            for row in group.runs[0].diagnostics
            if isinstance(row.get(key), list) and any(row[key])
        ]
        for j, row in enumerate(found if alone else found[-1:]):
            at, share = _shares(row, key)
            name = f"round {row['round']}" if alone else f"{group.label}, round {row['round']}"
            traces.append({**_line(at, share, name, i + j, shape="hvh"), "mode": "lines"})
            rows += [[group.label, row["round"], a, s] for a, s in zip(at, share, strict=True)]
            noise = number(row.get("noise_std"))
            if noise and key.startswith("sqrt_v") and not marks:
                marks.append({"value": noise, "text": "noise alone", "way": "x"})
    if not traces:
        return None
    said = f"Share of coordinates by the size of {unit}, over the clients of a round (first run)."
    x, y = (
        axis(f"{unit}, logarithmic", type="log", exponentformat="power"),
        axis("coordinates, %", rangemode="tozero"),
    )
    head = ["method", "round", unit, "coordinates, %"]
    return Figure(fig, "diagnostics", title, said, x, y, traces, head, rows, {"marks": marks})


def _shares(row: Mapping[str, Any], key: str) -> tuple[list[float], list[float]]:
    """Middles of the bins and the share of each in per cent, with a few of the empty bins at both ends."""
    counts = np.nan_to_num(np.asarray(row[key], dtype=float))
    low, high = (float(v) for v in row.get("histogram_log10") or (-9, 1))
    at = 10 ** (low + (high - low) * (np.arange(len(counts)) + 0.5) / len(counts))
    some = counts.nonzero()[0]
    cut = slice(max(0, int(some.min()) - 4), int(some.max()) + 5)
    return at[cut].tolist(), (100 * counts / counts.sum())[cut].tolist()


def all_figures(groups: Sequence[Group], listings: Sequence[Listing]) -> list[Figure]:
    found = [
        *training(groups),
        epsilon_over_rounds(groups),
        accuracy_against_epsilon(groups),
        clients_epsilon(groups),
        *(along_axis(listing, i) for i, listing in enumerate(listings)),
        label_map(groups),
        *communication(groups),
        *diagnostics(groups),
    ]
    return [figure for figure in found if figure is not None]

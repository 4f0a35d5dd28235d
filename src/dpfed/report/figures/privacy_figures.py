"""Privacy figures of the HTML report: epsilon over rounds, by client, and against accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpfed.privacy.published import PLOTTED_DIGITS, plotted_loss, show_setting
from dpfed.report.figures.figure import ROUNDS, Figure, axis, bars, inert, joined, line, short
from dpfed.report.run_reader import Group, Privacy, RunData, number

# (colour number, dash) of two lines: epsilon against the server, and against an observer who sees
# only the global models. Colours 0 and 1 belong to the first two methods.
STYLES = ((6, "solid"), (2, "dash"))
MOST_SPENT = "client that spent most so far"
MOST_SPENT_SERIES = 3


class Plan(NamedTuple):
    """A privacy plan (such as its noise and rounds), and the groups of runs that follow it.

    name     labels of the groups that follow the plan, joined; "" if all groups follow it
    group    the first of these groups
    privacy  the privacy spending of `group`
    """

    name: str
    group: Group
    privacy: Privacy


def epsilon_axis(title: str, **more: Any) -> dict[str, Any]:
    """Return a plotly axis for epsilon, which sets the number of digits shown under the mouse."""
    return axis(title, hoverformat=f".{PLOTTED_DIGITS}~r", **more)


def losses(values: Iterable[float]) -> list[float]:
    return [plotted_loss(value) for value in values]


def plans(groups: Sequence[Group]) -> list[Plan]:
    """Return the distinct privacy plans of the groups of runs, each with the groups that use it."""
    found: dict[Any, list[Group]] = {}
    for group in groups:
        if group.privacy is not None:
            key = (group.privacy.planned, group.privacy.void, _limit(group))
            found.setdefault(key, []).append(group)
    out = []
    for members in found.values():
        name = joined([group.label for group in members]) if len(found) > 1 else ""
        assert members[0].privacy is not None
        out.append(Plan(name, members[0], members[0].privacy))
    return out


def _limit(group: Group) -> tuple[str, float] | None:
    section = group.settings.get("privacy", {})
    for key, word in (("budget", "budget"), ("target_epsilon", "target")):
        if (value := number(section.get(key))) is not None:
            return word, value
    return None


def epsilon_over_rounds(groups: Sequence[Group]) -> Figure | None:
    """Return the figure of the planned epsilon after each round, against two observers.

    The observers are the server, and a third party, who sees only the global models. A page that is
    not public also shows the largest epsilon that a client has spent. Return None if no group has
    privacy.
    """
    found = plans(groups)
    if not found:
        return None
    traces, rows = [], []
    for index, plan in enumerate(found):
        at, *curves = plan.privacy.over_rounds()
        start = _before_round_1(plan.privacy)
        views = (f"server, {plan.privacy.planned.worst_client}", "third party")
        for view, (neutral, dash), curve in zip(views, STYLES, curves, strict=True):
            values = losses(curve)
            name = f"{view} ({plan.name})" if plan.name else view
            series = index if plan.name else neutral
            traces.append(line([0, *at], [start, *values], name, series, dash=dash))
            rows += [[name, t, value] for t, value in zip(at, values, strict=True)]
        # On a public page there is no such curve: `read_run_data` has removed what clients really
        # spent.
        spent = plan.group.runs[0].curve("epsilon_server_max")
        if spent and not plan.name:
            values = losses(spent.values())
            traces.append(line(list(spent), values, MOST_SPENT, MOST_SPENT_SERIES, dash="dot"))
            rows += [[MOST_SPENT, t, value] for t, value in zip(spent, values, strict=True)]
    first = found[0].privacy
    points = len(first.over_rounds()[0])
    caption = (
        "What the plan allows after each round. The server sees every message and who took part; "
        "a third party sees only the global models, and not who took part. Smaller is more private."
    )
    if points < first.planned.rounds:
        caption += f" Computed at {points} rounds and joined by lines."
    return Figure(
        id="epsilon",
        section="privacy",
        title="Epsilon over rounds",
        caption=caption,
        x=axis(ROUNDS),
        y=epsilon_axis(f"epsilon at δ = {short(first.planned.delta)}", rangemode="tozero"),
        traces=traces,
        head=["view", "round", "epsilon"],
        rows=rows,
        more={"marks": _limit_marks(found)},
    )


def _limit_marks(found: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return a horizontal line, as a dict, for each budget or target epsilon of the plans."""
    limits = dict.fromkeys(limit for plan in found if (limit := _limit(plan.group)) is not None)
    return [{"value": value, "text": f"{word} {show_setting(value)}"} for word, value in limits]


def _before_round_1(privacy: Privacy) -> float:
    return plotted_loss(privacy.planned.server(0)) if privacy.planned.prior else 0.0


def accuracy_against_epsilon(groups: Sequence[Group]) -> Figure:
    traces, rows = [], []
    for i, group in enumerate(groups):
        at, values = group.bands("accuracy")
        if not at or group.privacy is None:
            continue
        mean = dict(zip(at, (100 * values.mean(0)).tolist(), strict=True))
        rounds, server, _ = group.privacy.over_rounds()
        points = [(t, e, mean[t]) for t, e in zip(rounds, losses(server), strict=True) if t in mean]
        if points:
            shown, epsilons, accuracies = zip(*points, strict=True)
            text = [f"round {t}" for t in shown]
            traces.append({**line(epsilons, accuracies, group.label, i), "text": text})
            rows += [[group.label, *point] for point in points]
    return Figure(
        id="tradeoff",
        section="privacy",
        title="Accuracy against epsilon",
        caption="Round by round, for a client in as many of them as it may (mean over seeds). "
        "Up and left is better.",
        x=epsilon_axis("epsilon, server's view", rangemode="tozero"),
        y=axis("accuracy, %"),
        traces=traces,
        head=["method", "round", "epsilon", "accuracy, %"],
        rows=rows,
    )


def clients_epsilon(groups: Sequence[Group]) -> Figure | None:
    """Return the histogram of the clients' epsilons, for the first run of each group.

    Groups whose clients have equal epsilons are drawn as one set of bars. Return None if no group
    has the epsilons of single clients. A public page leaves these epsilons out.
    """
    found: dict[tuple[float, ...], list[Group]] = {}
    for group in groups:
        if group.privacy and group.privacy.epsilons:
            found.setdefault(group.privacy.epsilons, []).append(group)
    if not found:
        return None
    top = max(map(max, found))
    edges = np.linspace(0, top * 1.0001 or 1.0, 25)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    traces = []
    rows = []
    for i, (epsilons, members) in enumerate(found.items()):
        counts = np.histogram(epsilons, edges)[0].tolist()
        traces.append(bars(middles, counts, inert(joined([g.label for g in members])), i))
        for group in members:
            clients = zip(client_names(group.runs[0], len(epsilons)), losses(epsilons), strict=True)
            rows += [[group.label, *client] for client in clients]
    return Figure(
        id="clients",
        section="privacy",
        title="Epsilon of every client",
        caption="What the server has learned of each client so far, by the rounds it really took "
        "part in (first run of each method). For the operator only: published, it would void the "
        "third party's figure.",
        x=axis("epsilon of a client, server's view", range=[0, top * 1.04 or 1.0]),
        y=axis("clients"),
        traces=traces,
        head=["method", "client", "epsilon"],
        rows=rows,
        more={"barmode": "group", "bargap": 0.08},
    )


def client_names(run: RunData, count: int) -> list[str] | list[int]:
    """Return the names of a run's clients, or numbers from 0 if names are missing or repeated."""
    names = run.result.get("client_names")
    if isinstance(names, list) and len({str(name) for name in names}) == count == len(names):
        return [str(name) for name in names]
    return list(range(count))

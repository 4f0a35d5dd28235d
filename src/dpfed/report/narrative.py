"""What a page says in words: its title, the headline, the privacy statement. Every text is plain; the page escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpfed.privacy.accounting.guarantee import NOT_COVERED, PUBLIC
from dpfed.privacy.published import show_loss, show_percent
from dpfed.report.figures import joined, short
from dpfed.report.run_reader import Group, RunData, number
from dpfed.studies.tables import Row, Table, best_of, larger_epsilon, size
from dpfed.text import counted
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.callbacks.public_figures import LEFT_OUT

OPERATOR = (
    "For the operator only: this page shows what single clients have spent and what they hold. Made with --public, a page "
    "leaves that out."
)


@dataclass(frozen=True)
class Card:
    """One number of the headline."""

    name: str
    value: str
    note: str


def title_of(groups: Sequence[Group], titles: Sequence[str]) -> str:
    if len(titles) == 1:
        return titles[0]
    found = {f"{_setting(g, 'model', 'name')} on {_setting(g, 'data', 'name')}" for g in groups}
    return found.pop() if len(found) == 1 else f"{len(groups)} methods side by side"


def lead(groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    if runs == 1:
        return f"One run of {groups[0].label}: {_shape(groups[0])}."
    if len(groups) == 1:
        return f"{counted(runs, 'run')} of {groups[0].label} that differ in their seed: {_shape(groups[0])}."
    shapes = {_shape(group) for group in groups}
    return f"{counted(runs, 'run')} of {counted(len(groups), 'method')}" + (
        f": {shapes.pop()}." if len(shapes) == 1 else "."
    )


def _shape(group: Group) -> str:
    run = group.settings.get("run", {})
    clients = number(group.first("clients")) or number(_setting(group, "data", "clients"))
    share, rounds, steps = (
        number(run.get(key)) for key in ("participation", "rounds", "local_steps")
    )
    if clients is None or share is None or rounds is None or steps is None:
        return "settings below"
    cohort = max(1, round(share * clients))
    who = "all of them" if cohort == clients else f"{cohort} of them"
    each = "in one round" if rounds == 1 else f"in each of {rounds:.0f} rounds"
    return f"{counted(int(clients), 'client')}, {who} {each}, {counted(int(steps), 'local step')}"


def _setting(group: Group, section: str, key: str) -> Any:
    table = group.settings.get(section)
    return table.get(key) if isinstance(table, dict) else None


def best_group(groups: Sequence[Group]) -> Group | None:
    """The highest mean accuracy among those that spend the same epsilon; the only one if there is one."""
    rows = tuple(
        Row(label=g.label, accuracies=g.accuracies, epsilon=g.epsilon)
        for g in groups
        if g.accuracies
    )
    names = best_of(rows, larger_epsilon(Table("", "", rows)), least=1)
    return next((group for group in groups if group.label in names), None)


def cards(groups: Sequence[Group]) -> list[Card]:
    group = best_group(groups)
    if group is None:
        return []
    found = group.accuracies
    row = Row(label=group.label, accuracies=found)
    start = number(group.first("start_accuracy"))
    seeds = (
        f"mean of {len(found)} seeds, ± {show_percent(row.std)} points"
        if row.std is not None
        else "one seed"
    )
    notes = [
        group.label if len(groups) > 1 else "",
        seeds,
        f"{show_percent(start)} % before training" if start else "",
    ]
    out = [
        Card(
            "Accuracy",
            f"{show_percent(row.mean or 0.0)} %",
            "; ".join(note for note in notes if note),
        )
    ]
    server, third = (group.epsilon[view] for view in ("server_worst", "third_party"))
    delta = number(group.first("delta")) or (group.privacy.planned.delta if group.privacy else None)
    at = f", δ\u00a0=\u00a0{short(delta)}".replace("-", "\u2011") if delta else ""
    planned = ""
    if group.unfinished is not None and server is not None:
        planned = " planned"
        out.append(_spent_card(group, group.unfinished, at))
    if server is not None:
        seen = f"it sees every message of a client in every round{at}"
        out.append(Card(f"Epsilon{planned}, server", show_loss(server, 2), seen))
    if third is not None:
        out.append(
            Card(
                f"Epsilon{planned}, third party",
                show_loss(third, 2),
                f"sees the global models only{at}",
            )
        )
    if server is None and group.first("release") == NO_PRIVACY:
        out.append(Card("Epsilon", "none", "trained without privacy"))
    traffic = group.first("traffic")
    if isinstance(traffic, dict) and number(traffic.get("up_bytes")) is not None:
        down = size(traffic.get("down_bytes", 0))
        out.append(
            Card("Sent", size(traffic["up_bytes"]), f"by a client in a round; it receives {down}")
        )
    return out


def _spent_card(group: Group, run: RunData, at: str) -> Card:
    """The epsilon that an unfinished run has spent, apart from the one that is planned."""
    value = "not known" if group.spent is None else show_loss(group.spent, 2)
    who = (
        "by the client that spent most"
        if run.curve("epsilon_server_max")
        else "by a client in every round"
    )
    return Card(
        "Epsilon spent so far", value, f"{who}, after round {run.last} of {run.planned_rounds}{at}"
    )


def meaning(groups: Sequence[Group]) -> str:
    """The headline's epsilon in one sentence that needs no mathematics."""
    group = best_group(groups)
    if group is None:
        return "Nothing has been scored yet."
    if group.privacy is None:
        none = group.first("release") == NO_PRIVACY
        return "Nothing in this model's training is protected." if none else ""
    unit = group.privacy.planned.unit
    return (
        f"What {'the planned epsilon' if group.unfinished else 'it'} means: even with everything the server sees, nobody "
        f"can tell whether one {unit} of a client was used with "
        f"an advantage above {show_loss(group.privacy.advantage, 2)} (hits minus false alarms; 0 is guessing, 1 is certainty)."
    )


def banners(groups: Sequence[Group], public: bool) -> list[tuple[str, str]]:
    """(kind, sentence): what must not be overlooked."""
    runs = [run for group in groups for run in group.runs]
    notes = {str(run.result.get("release", "")) for run in runs}
    out = []
    if any(note == NO_PRIVACY for note in notes):
        out.append(
            ("warn", "No privacy: runs on this page were trained without differential privacy.")
        )
    if any(note.startswith(SEEDED) for note in notes) or any(
        g.privacy and g.privacy.seeded for g in groups
    ):
        said = "Simulation, not for release: the noise was seeded, so that whoever knows the seed can remove it."
        out.append(("warn", said))
    if not public:
        out.append(("note", OPERATOR))
    out += [
        ("warn", f"{group.label}: {group.trouble}")
        for group in groups
        if group.trouble and not _going_on(group)
    ]
    return out


def _going_on(group: Group) -> bool:
    return any(run.result.get("state") == "running" for run in group.runs)


def live(runs: Sequence[RunData]) -> str:
    """How far the runs are that go on, or nothing."""
    going = [run for run in runs if run.result.get("state") == "running"]
    if not going:
        return ""
    furthest = max(going, key=lambda run: run.last)
    more = f" ({len(going)} runs)" if len(going) > 1 else ""
    return f"round {furthest.last} of {furthest.planned_rounds}{more}"


def statement(groups: Sequence[Group], public: bool) -> list[tuple[str, str]]:
    """(head, text) of the privacy statement: the same sentences that the command line and the model card use."""
    private = [group for group in groups if group.privacy is not None]
    if not private:
        return [
            (
                "None",
                "Nothing on this page was trained with privacy, so there is no guarantee to state.",
            )
        ]
    first = private[0].privacy
    assert first is not None
    planned = first.planned
    out = [("Protected", f"one {planned.unit} of one client, {planned.kinds[0].adjacency}.")]
    said = list(dict.fromkeys(g.privacy.planned.assumptions() for g in private if g.privacy))
    for text in said:
        names = [g.label for g in private if g.privacy and g.privacy.planned.assumptions() == text]
        out.append(("Guarantee" if len(said) == 1 else f"Guarantee of {joined(names)}", f"{text}."))
    third = (
        first.void
        or "it holds only while the seed, the cohorts and every figure of a single client stay secret"
    )
    out.append(
        (
            "Third party",
            f"{third}{'' if public else '; publish it with --public, never beside the others'}.",
        )
    )
    out += [("Assumed public", f"{PUBLIC}."), ("Not covered", f"{NOT_COVERED}.")]
    runs = sum(len(group.runs) for group in private)
    more = f" The {runs} runs here used the same records: each epsilon is that of one run, and what all of them spent adds up."
    out.append(
        (
            "Tuning",
            "Epsilon excludes any choice of settings on these data." + (more if runs > 1 else ""),
        )
    )
    return out


def left_out() -> list[tuple[str, str]]:
    return list(LEFT_OUT)

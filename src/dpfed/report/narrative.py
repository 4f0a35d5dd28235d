"""The sentences of a report page: title, headline, banners and privacy statement, as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpfed.errors import counted
from dpfed.privacy.published import show_loss, show_percent, show_perplexity, show_score
from dpfed.report.figures.figure import joined, short
from dpfed.report.run_reader import Group, RunData, number
from dpfed.report.statement.text import first_line, rows
from dpfed.report.tables import Row, Table, best_of, larger_epsilon, size
from dpfed.training.budget.release import NO_PRIVACY, SEEDED

NO_PRIVACY_BANNER = "No privacy: runs on this page were trained without differential privacy."
SEEDED_BANNER = (
    "Simulation, not for release: the noise was seeded, so that whoever knows the seed can remove "
    "it."
)
OPERATOR_BANNER = (
    "For the operator only: this page shows what single clients have spent and what they hold. "
    "Made with --public, a page leaves that out."
)

# Scores of tasks without accuracy: key in the result of a run, name on the page, and function that
# formats the value.
OTHER_SCORES = (("perplexity", "Perplexity", show_perplexity), ("r2", "R2", show_score))


@dataclass(frozen=True)
class Card:
    """A card at the top of the page: one number with its name, its value as text, and a note."""

    name: str
    value: str
    note: str


def title_of(groups: Sequence[Group], study_titles: Sequence[str]) -> str:
    """Return the page's title: the title of the only study on the page, else "MODEL on DATA".

    If the groups of runs have different models or data, the title gives the number of methods.
    """
    if len(study_titles) == 1 or not groups:
        return study_titles[0]
    found = {f"{_setting(g, 'model', 'name')} on {_setting(g, 'data', 'name')}" for g in groups}
    return found.pop() if len(found) == 1 else f"{len(groups)} methods side by side"


def _setting(group: Group, section: str, key: str) -> Any:
    table = group.settings.get(section)
    return table.get(key) if isinstance(table, dict) else None


def lead(groups: Sequence[Group]) -> str:
    """Return the sentence below the title: number of runs, clients, rounds and local steps."""
    if not groups:
        return ""
    runs = sum(len(group.runs) for group in groups)
    shapes = {_shape(group) for group in groups}
    shape = f": {shapes.pop()}." if len(shapes) == 1 else "."
    if runs == 1:
        return f"One run of {groups[0].label}{shape}"
    if len(groups) == 1:
        return f"{counted(runs, 'run')} of {groups[0].label} that differ in their seed{shape}"
    return f"{counted(runs, 'run')} of {counted(len(groups), 'method')}{shape}"


def _shape(group: Group) -> str:
    """Return the size of a run as text: clients, clients per round, rounds and local steps."""
    clients = number(group.first("clients")) or number(_setting(group, "data", "clients"))
    keys = ("participation", "rounds", "local_steps")
    share, rounds, steps = (number(_setting(group, "run", key)) for key in keys)
    if clients is None or share is None or rounds is None or steps is None:
        return "settings below"
    cohort = max(1, round(share * clients))
    who = "all of them" if cohort == clients else f"{cohort} of them"
    each = "in one round" if rounds == 1 else f"in each of {rounds:.0f} rounds"
    return f"{counted(int(clients), 'client')}, {who} {each}, {counted(int(steps), 'local step')}"


def best_group(groups: Sequence[Group]) -> Group | None:
    """Return the group of runs with the highest mean score among those with the smallest epsilon.

    Return None if no run has a score yet.
    """
    rows = tuple(Row(label=g.label, scores=g.scores, epsilon=g.epsilon) for g in groups if g.scores)
    names = best_of(rows, larger_epsilon(Table("", "", rows)), least=1)
    return next((group for group in groups if group.label in names), None)


def cards(groups: Sequence[Group]) -> list[Card]:
    """Return the cards at the top of the page: score, epsilons and sent bytes of the best group.

    There is one epsilon against the server, and one against a third party, who sees only the global
    models.
    """
    group = best_group(groups)
    if group is None:
        return []
    out = [_score_card(group, len(groups) > 1), *_epsilon_cards(group)]
    traffic = group.first("traffic")
    if isinstance(traffic, dict) and number(traffic.get("up_bytes")) is not None:
        note = f"by a client in a round; it receives {size(traffic.get('down_bytes', 0))}"
        out.append(Card("Sent", size(traffic["up_bytes"]), note))
    return out


def _score_card(group: Group, named: bool) -> Card:
    """Return the card with a group's score: accuracy, or perplexity or R2 if the task has one.

    named  True to show the group's label on the card
    """
    for key, name, shown in OTHER_SCORES:
        found = [number(run.result.get(f"test_{key}")) for run in group.runs]
        reached = [value for value in found if value is not None]
        if reached:
            notes = [group.label] if named else []
            notes.append("one seed" if len(reached) == 1 else f"mean of {len(reached)} seeds")
            notes.append(f"{shown(number(group.first(f'start_{key}')))} before training")
            return Card(name, shown(sum(reached) / len(reached)), "; ".join(notes))
    row = Row(label=group.label, scores=group.accuracies)
    start = number(group.first("start_accuracy"))
    notes = [group.label] if named else []
    if row.std is None:
        notes.append("one seed")
    else:
        seeds = len(row.scores)
        notes.append(f"mean of {seeds} seeds, ± {show_percent(row.std)} points")
    if start:
        notes.append(f"{show_percent(start)} % before training")
    return Card("Accuracy", f"{show_percent(row.mean or 0.0)} %", "; ".join(notes))


def _epsilon_cards(group: Group) -> list[Card]:
    server = group.epsilon["server_worst"]
    third = group.epsilon["third_party"]
    delta = number(group.first("delta")) or (group.privacy and group.privacy.planned.delta)
    # Use a non-breaking space and hyphen. Otherwise a browser could break the line inside "δ =
    # 1e-5".
    at = f", δ\u00a0=\u00a0{short(delta)}".replace("-", "\u2011") if delta else ""
    planned = ""
    out = []
    if group.unfinished is not None and server is not None:
        planned = " planned"
        out.append(_spent_card(group, group.unfinished, at))
    if server is not None:
        note = f"it sees every message of {_worst_client(group)}{at}"
        out.append(Card(f"Epsilon{planned}, server", show_loss(server, 2), note))
    elif group.first("release") == NO_PRIVACY:
        out.append(Card("Epsilon", "none", "trained without privacy"))
    if third is not None:
        note = f"sees the global models only{at}"
        out.append(Card(f"Epsilon{planned}, third party", show_loss(third, 2), note))
    return out


def _worst_client(group: Group) -> str:
    return group.privacy.planned.worst_client if group.privacy else "a client in every round"


def _spent_card(group: Group, run: RunData, at: str) -> Card:
    """Return the card with the epsilon that an unfinished run has spent so far.

    Another card shows the epsilon that is planned for the whole run.

    at  text with the value of delta, which is appended to the note on the card
    """
    value = "not known" if group.spent is None else show_loss(group.spent, 2)
    who = f"by {_worst_client(group)}"
    if run.curve("epsilon_server_max"):
        who = "by the client that spent most"
    note = f"{who}, after round {run.last} of {run.planned_rounds}{at}"
    return Card("Epsilon spent so far", value, note)


def planned_epsilon_note(group: Group) -> list[str]:
    """Return a note that the group's epsilon in the table is planned and not fully spent yet.

    The result is a list with this note for an unfinished group, and an empty list otherwise.
    """
    run = group.unfinished
    if run is None or group.spent is None:
        return []
    so_far = f"{show_loss(group.spent, 2)} is spent after round {run.last} of {run.planned_rounds}"
    return [f"{group.label}: epsilon in the table is the planned one; {so_far}"]


def meaning(groups: Sequence[Group]) -> str:
    """Return a sentence that explains the best group's epsilon without mathematics."""
    group = best_group(groups)
    if group is None:
        return "Nothing has been scored yet." if groups else ""
    if group.privacy is None:
        none = group.first("release") == NO_PRIVACY
        return "Nothing in this model's training is protected." if none else ""
    subject = "the planned epsilon" if group.unfinished else "it"
    return (
        f"What {subject} means: even with everything the server sees, nobody can tell whether one "
        f"{group.privacy.planned.unit} of a client was used with an advantage above "
        f"{show_loss(group.privacy.advantage, 2)} (hits minus false alarms; 0 is guessing, 1 is "
        "certainty)."
    )


def banners(groups: Sequence[Group], public: bool) -> list[tuple[str, str]]:
    """Return the warnings and notes at the top of the page, as pairs (kind, sentence).

    The kind is "warn" or "note".
    """
    notes = {str(run.result.get("release", "")) for group in groups for run in group.runs}
    seeded = any(group.privacy and group.privacy.seeded for group in groups)
    out = []
    if NO_PRIVACY in notes:
        out.append(("warn", NO_PRIVACY_BANNER))
    if seeded or any(note.startswith(SEEDED) for note in notes):
        out.append(("warn", SEEDED_BANNER))
    if not public:
        out.append(("note", OPERATOR_BANNER))
    for group in groups:
        if group.trouble and not any(run.running for run in group.runs):
            out.append(("warn", f"{group.label}: {group.trouble}"))
    return out


def live(runs: Sequence[RunData]) -> str:
    """Return the progress, such as "round 3 of 10", of the running run with the most rounds.

    Return "" if no run is in progress.
    """
    running = [run for run in runs if run.running]
    if not running:
        return ""
    furthest = max(running, key=lambda run: run.last)
    more = f" ({len(running)} runs)" if len(running) > 1 else ""
    return f"round {furthest.last} of {furthest.planned_rounds}{more}"


Pairs = list[tuple[str, str]]


def statements(groups: Sequence[Group], public: bool) -> list[tuple[str, Pairs]]:
    """Return the privacy statements as pairs (title, pairs of a name and a sentence).

    Methods with equal statements share one entry. `dpfed privacy --statement` and the model cards
    show the same statements.
    """
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for group in groups:
        if group.privacy is not None:
            stated = group.privacy.statement
            pairs = (("In short", first_line(stated)), *rows(stated))
            key = tuple(pair for pair in pairs if pair[0] != "Ledger head" or len(groups) == 1)
            found.setdefault(key, []).append(group.label)
    if not found:
        said = "Nothing on this page was trained with privacy, so there is no guarantee to state."
        return [("The privacy statement", [("None", said)])]
    notes = _page_notes(groups, public)
    out = []
    for key, names in found.items():
        of = f" of {joined(names)}" if len(found) > 1 else ""
        out.append((f"The privacy statement{of}", [*key, *notes]))
    return out


def _page_notes(groups: Sequence[Group], public: bool) -> Pairs:
    """Return notes on the page as a whole, to be shown with the privacy statements of its runs."""
    notes = []
    if not public:
        notes.append(("This page", "Publish it with --public, never beside figures of a client."))
    runs = sum(len(group.runs) for group in groups if group.privacy is not None)
    if runs > 1:
        said = (
            f"The {runs} runs here used the same records: each epsilon is that of one run, and "
            "what all of them spent adds up."
        )
        notes.append(("Tuning", said))
    return notes

"""The sections of a report page below its headline: figures, tables and lists, for a template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from dpfed.federation.server.status import client_rows, headline, refusal_rows
from dpfed.privacy.published import show_setting
from dpfed.report import narrative
from dpfed.report.figures.figure import Figure
from dpfed.report.generated_texts import COLUMNS, examples
from dpfed.report.measures import ACCURACY, DASH
from dpfed.report.run_reader import Group, RunData, number
from dpfed.report.tables import (
    Table,
    Words,
    cells,
    emphasised,
    footnotes,
    grid_words,
)
from dpfed.training.callbacks.public_figures import LEFT_OUT, flat

TITLES = {
    "federation": "Federation",
    "training": "Training",
    "examples": "Generated texts",
    "privacy": "Privacy",
    "comparison": "Comparison",
    "clients": "Clients' data",
    "communication": "Communication",
    "diagnostics": "Diagnostics",
    "settings": "Settings",
    "environment": "Environment",
    "left-out": "Left out",
}
SIZES = {"parameters": "trained numbers", "blocks": "blocks", "test_records": "test records"}
RUN_COLUMNS = ["run", "method", "seed", "state", "rounds", "accuracy", "seconds"]
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Card:
    """A box of text on the page: a title, a sentence, names with values, tables, and notes below.

    wraps  True for tables of words, whose cells may break over several lines
    """

    title: str = ""
    sentence: str = ""
    pairs: Pairs = ()
    tables: Sequence[Words] = ()
    notes: Sequence[str] = ()
    wraps: bool = False


@dataclass(frozen=True)
class Section:
    """One section of a report page: figures, then wide cards, then small cards in columns."""

    name: str
    title: str
    figures: Sequence[Figure] = ()
    cards: Sequence[Card] = ()
    small_cards: Sequence[Card] = ()


LEFT_OUT_CARD = Card(
    sentence="This page may be read by a third party, whose epsilon holds only while nobody "
    "outside knows who took part. So it holds none of these:",
    tables=[(["left out", "because"], [list(row) for row in LEFT_OUT])],
    wraps=True,
)


def sections_of(
    groups: Sequence[Group],
    tables: Sequence[Table],
    figures: Sequence[Figure],
    public: bool,
    federations: Sequence[Mapping[str, Any]] = (),
) -> list[Section]:
    """Return the sections of the page in order, without empty sections.

    federations  status of each running federation, as `read_status` returns it
    """
    cards = {
        "federation": list(map(_federation, federations)),
        "examples": list(_examples(groups)),
        "privacy": _privacy(groups, public),
        "comparison": list(map(_comparison, tables)),
        "settings": _differing_settings(groups),
        "environment": list(_environment(groups, public)),
        "left-out": [LEFT_OUT_CARD] if public else [],
    }
    small_cards = {"settings": list(_settings(groups))}
    found = [
        Section(
            name=name,
            title=title,
            figures=[figure for figure in figures if figure.section == name],
            cards=cards.get(name, []),
            small_cards=small_cards.get(name, []),
        )
        for name, title in TITLES.items()
    ]
    return [part for part in found if part.figures or part.cards or part.small_cards]


def _federation(status: Mapping[str, Any]) -> Card:
    tables: list[Words] = [(["client", "connection", "left out"], client_rows(status))]
    refusals = refusal_rows(status)
    if refusals:
        tables.append((["round", "client", "left out because"], refusals))
    note = f"updated {status['updated']}; a client's total epsilon is in its own ledger only"
    return Card(sentence=headline(status), tables=tables, notes=[note], wraps=True)


def _examples(groups: Sequence[Group]) -> Iterator[Card]:
    """Yield a card for each method with the texts that its first run's language model wrote."""
    for group in groups:
        rows = [[text[name] for name in COLUMNS] for text in examples(group.runs[0].result)]
        if rows:
            yield Card(
                group.label if len(groups) > 1 else "",
                sentence="Greedy generation after public test prompts, before and after training.",
                tables=[(list(COLUMNS), rows)],
                wraps=True,
            )


def _privacy(groups: Sequence[Group], public: bool) -> list[Card]:
    if not groups:
        return []
    return [Card(title, pairs=pairs) for title, pairs in narrative.statements(groups, public)]


def bold(text: str) -> str:
    """Return a text as HTML: in bold, with special characters escaped."""
    return Markup("<strong>{}</strong>").format(text)


def _comparison(table: Table) -> Card:
    head, body = cells(table)
    columns = [
        j for j in range(len(head)) if j == 0 or any(line[j] not in (DASH, "0") for line in body)
    ]
    lines = emphasised(table, body, bold)
    shown = [head[j] for j in columns], [[line[j] for j in columns] for line in lines]
    grid = grid_words(table, bold)
    tables = [shown] if grid is None else [grid, shown]
    notes = [*footnotes(table), *table.notes]
    words = [word for _, lines in tables for line in lines for word in line]
    if any(isinstance(word, Markup) for word in words):
        notes.append("the best on equal terms is in bold")
    return Card(table.title, tables=tables, notes=notes)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return show_setting(value)
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)


def _common_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the settings that have equal values in all groups of runs."""
    first, *others = [flat(group.settings) for group in groups]
    common = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }
    # The runs of a group have different seeds, so leave the seed out of the common settings.
    if any(len(group.runs) > 1 for group in groups):
        common.pop("run.seed", None)
    return common


def _differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return the setting keys that at least two groups have, and that differ between groups."""
    settings = [flat(group.settings) for group in groups]
    hidden = {*_common_settings(groups), "run.seed"}
    every_key = dict.fromkeys(key for table in settings for key in table if key not in hidden)
    return [key for key in every_key if sum(key in table for table in settings) > 1]


def _differing_settings(groups: Sequence[Group]) -> list[Card]:
    keys = _differing_keys(groups) if groups else []
    settings = [flat(group.settings) for group in groups]
    rows = [
        [key, *(_shown(table[key]) if key in table else DASH for table in settings)] for key in keys
    ]
    table = ["key", *(group.label for group in groups)], rows
    return [Card("Where the methods differ", tables=[table], wraps=True)] if rows else []


def _settings(groups: Sequence[Group]) -> Iterator[Card]:
    """Yield a card for each section of the common settings, then one for each method's own keys."""
    if not groups:
        return
    common = _common_settings(groups)
    for section in dict.fromkeys(key.split(".")[0] for key in common):
        mine = {key: value for key, value in common.items() if key.split(".")[0] == section}
        yield Card(section, pairs=_setting_pairs(mine))
    listed = {*common, *_differing_keys(groups), "run.seed"}
    for group in groups:
        own = {key: value for key, value in flat(group.settings).items() if key not in listed}
        if own:
            yield Card(f"{group.label} only", pairs=_setting_pairs(own))


def _setting_pairs(settings: Mapping[str, Any]) -> Pairs:
    return [(key.split(".", 1)[-1], _shown(value)) for key, value in settings.items()]


def _environment(groups: Sequence[Group], public: bool) -> Iterator[Card]:
    runs = [run for group in groups for run in group.runs]
    seen: dict[str, list[str]] = {}
    for run in runs:
        versions = run.result.get("versions")
        found = dict(versions) if isinstance(versions, dict) else {}
        if "python" in run.result:
            found["python"] = run.result["python"]
        for name, version in found.items():
            seen.setdefault(str(name), []).append(str(version))
    pairs = [(name, ", ".join(dict.fromkeys(found))) for name, found in seen.items()]
    first = next((run.result for run in runs if "parameters" in run.result), {})
    counts = {word: number(first.get(key)) for key, word in SIZES.items()}
    pairs += [(word, f"{count:,.0f}") for word, count in counts.items() if count is not None]
    if pairs:
        yield Card("Versions and sizes", pairs=pairs)
    if runs and not public:
        lines = [_run_line(group, run) for group in groups for run in group.runs]
        yield Card("Runs on this page", tables=[(RUN_COLUMNS, lines)])


def _run_line(group: Group, run: RunData) -> list[str]:
    seconds = number(run.rows[-1].get("seconds")) if run.rows else None
    diverged = ", diverged" if run.diverged else ""
    return [
        run.name,
        group.label,
        _shown(run.settings.get("run", {}).get("seed", DASH)),
        f"{run.result.get('state', 'unknown')}{diverged}",
        str(run.last),
        ACCURACY.shown(run.accuracy, None),
        DASH if seconds is None else f"{seconds:.1f}",
    ]

"""The table of a comparison of methods: its rows, its best rows, and its cells as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dpfed.privacy.published import show_loss, show_number
from dpfed.report.measures import ACCURACY, DASH, Measure
from dpfed.training.callbacks.public_figures import FIGURES

# Two epsilons count as equal if their ratio is below this factor. Runs whose noise is chosen for
# one target epsilon differ by less than this.
EQUAL_EPSILON_FACTOR = 1.01
# Footnotes by their mark, such as †. An asterisk is no mark, because it would begin a list in
# Markdown.
FOOTNOTES = {
    "†": "spends a larger epsilon than others at the same noise, so it is not on equal terms "
    "(never in bold)",
    "¶": "the best rate is at the edge of what was tried, or none was better than one answer for "
    "all: a better one may lie outside",
    "‡": "has runs that diverged, which count as accuracy 0",
    "§": "could not be run: ",
}
# Numbers of the columns that `cells` returns, in order of importance. A narrow screen shows only
# the first columns of this list.
IMPORTANCE = (0, 3, 4, 1, 5, 6, 2, 7, 8)
# Number of columns that every table has. Tables with further scores have a column for each of these
# after them.
FIXED_COLUMNS = len(IMPORTANCE)
EMPHASISED_COLUMNS = (0, 3)

Bold = Callable[[str], str]
Words = tuple[list[str], list[list[str]]]
"""Header and body of a table, as words."""


@dataclass(frozen=True)
class Row:
    """The results of one method or variant in a comparison.

    row, column  names of its row and its column, if the results form a grid
    rates        chosen learning rates by their key
    tuning_runs  number of runs of the search for learning rates
    at_edge      True if better rates may lie outside the range of tried rates
    scores       score of each reported seed, such as an accuracy from 0 to 1
    other        means over the seeds of other scores, by name; None if a seed has no such score
    diverged     number of runs that diverged
    difference   mean difference to the reference method over equal seeds, and half the width of its
                 95 % interval (None with one seed)
    epsilon      planned epsilon by observer: "server_worst", "third_party"; None without privacy
    guarantee    the text that stands beside an epsilon, such as delta and assumptions
    traffic      numbers and bytes that one client sends and receives in a round
    failed       the reason why there are no results, or None
    """

    label: str
    row: str = ""
    column: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    tuning_runs: int = 0
    at_edge: bool = False
    scores: tuple[float, ...] = ()
    other: Mapping[str, float | None] = field(default_factory=dict)
    diverged: int = 0
    difference: tuple[float, float | None] | None = None
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    guarantee: str = ""
    traffic: Mapping[str, int] | None = None
    failed: str | None = None

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.scores)) if self.scores else None

    @property
    def std(self) -> float | None:
        return float(np.std(self.scores, ddof=1)) if len(self.scores) > 1 else None

    @property
    def private(self) -> bool:
        return self.epsilon.get("server_worst") is not None


@dataclass(frozen=True)
class Table:
    """The table of a comparison: its rows, each with the results of one method or variant.

    axis       the setting that varies over the columns of a grid, empty without a grid
    reference  label of the row with which the others are compared
    notes      sentences below the table
    measure    the kind of score by which the rows are compared, such as accuracy
    """

    title: str
    axis: str
    rows: tuple[Row, ...]
    reference: str | None = None
    notes: tuple[str, ...] = ()
    measure: Measure = ACCURACY

    @property
    def other(self) -> tuple[str, ...]:
        """Names of further scores of the rows, such as perplexity, which have a column each."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.other))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of the paired differences `ours - theirs`, and half its 95 % t interval.

    Both lists hold one score per seed, in the same order. With one seed there is no interval,
    and the second value is None.
    """
    from scipy import stats

    gaps = np.asarray(ours) - np.asarray(theirs)
    if len(gaps) < 2:
        return float(gaps.mean()), None
    quantile = float(stats.t.ppf(0.975, len(gaps) - 1))
    return float(gaps.mean()), quantile * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))


def larger_epsilon(table: Table) -> set[str]:
    """Return the labels of rows with a larger epsilon than the smallest one of their column.

    Two epsilons that differ by a factor of at most EQUAL_EPSILON_FACTOR count as equal.
    """
    out = set()
    for column in {row.column for row in table.rows}:
        rows = [row for row in table.rows if row.column == column]
        spent = {row.label: e for row in rows if (e := row.epsilon.get("server_worst"))}
        out |= {
            label
            for label, value in spent.items()
            if value > EQUAL_EPSILON_FACTOR * min(spent.values())
        }
    return out


def best_of(rows: Sequence[Row], excluded: set[str], least: int = 2) -> set[str]:
    """Return the labels of the rows with the highest mean score; several if they are equal.

    If a row has privacy, rows without privacy are not compared. The set is empty if fewer than
    `least` rows can be compared.

    excluded  labels of rows that are not compared
    """
    scored = [row for row in rows if row.mean is not None]
    private = [row for row in scored if row.private]
    means = {row.label: row.mean or 0.0 for row in private or scored if row.label not in excluded}
    if len(means) < least:
        return set()
    top = max(means.values(), default=0.0)
    return {label for label, mean in means.items() if mean == top}


def size(count: float) -> str:
    """Return a number of bytes with its unit: "24.4 kB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def cells(table: Table) -> Words:
    """Return the names of the columns, and the cells of all rows, as text.

    Marks in the cells, such as †, refer to `footnotes`.
    """
    costly = larger_epsilon(table)
    reference = table.reference or "reference"
    shown = table.measure.shown
    score = f"{table.measure.name} {table.measure.unit}".strip()
    head = ["method", "tuned", "tuning runs", score, f"difference to {reference}"]
    head += ["epsilon (server)", "epsilon (third party)", "up", "down", *table.other]
    body = []
    for row in table.rows:
        rates = " ".join(f"{key} {lr:g}" for key, lr in row.rates.items())
        difference, half = row.difference or (None, None)
        line = [
            " ".join([row.label, *_marks(row, costly)]),
            rates or DASH,
            str(row.tuning_runs),
            shown(row.mean, row.std),
            shown(difference, half, sign=True),
            *(_epsilon(row, view) for view in FIGURES),
            _sent(row, "up"),
            _sent(row, "down"),
            *(_other(row, name) for name in table.other),
        ]
        body.append(line)
    return head, body


def _epsilon(row: Row, view: str) -> str:
    if row.private:
        return show_loss(row.epsilon[view], 2)
    return "no privacy" if row.scores else DASH


def _other(row: Row, name: str) -> str:
    value = row.other.get(name)
    return DASH if value is None else show_number(value)


def _sent(row: Row, way: str) -> str:
    if not row.traffic or f"{way}_numbers" not in row.traffic:
        return DASH
    return f"{row.traffic[f'{way}_numbers']:,} ({size(row.traffic[f'{way}_bytes'])})"


def _marks(row: Row, costly: set[str]) -> str:
    flags = row.label in costly, row.at_edge, row.diverged > 0, row.failed is not None
    return "".join(mark for mark, on in zip(FOOTNOTES, flags, strict=True) if on)


def footnotes(table: Table) -> list[str]:
    """Return the footnotes for the marks, such as †, that occur in the table."""
    costly = larger_epsilon(table)
    used = {mark for row in table.rows for mark in _marks(row, costly)}
    failed = "; ".join(f"{row.label}: {row.failed}" for row in table.rows if row.failed)
    sentences = {**FOOTNOTES, "§": FOOTNOTES["§"] + failed}
    if table.measure is not ACCURACY:
        sentences["‡"] = f"has runs that diverged, so it has no mean {table.measure.name}"
    return [f"{mark} {sentence}" for mark, sentence in sentences.items() if mark in used]


def emphasised(table: Table, body: Sequence[Sequence[str]], bold: Bold) -> list[list[str]]:
    """Return the cells of a table with the name and score of the best rows in bold.

    In a table with an axis (a setting that varies) nothing is bold, because `grid_words` shows the
    best rows.

    body  the cells that `cells` returned
    bold  makes a word bold in the format of the output
    """
    best = set() if table.axis else best_of(table.rows, larger_epsilon(table))
    return [
        [
            bold(word) if row.label in best and i in EMPHASISED_COLUMNS else word
            for i, word in enumerate(line)
        ]
        for row, line in zip(table.rows, body, strict=True)
    ]


def grid_words(table: Table, bold: Bold) -> Words | None:
    """Return the scores as a grid: one line per method, one column per value of the axis.

    The axis is the setting that varies between columns. Return None for a table without an axis.
    """
    if not table.axis:
        return None
    columns = list(dict.fromkeys(row.column for row in table.rows))
    names = list(dict.fromkeys(row.row for row in table.rows))
    at = {(row.row, row.column): row for row in table.rows}
    costly = larger_epsilon(table)
    best: set[str] = set()
    if len(names) > 1:
        for column in columns:
            best |= best_of([row for row in table.rows if row.column == column], costly)
    else:
        # If there is only one method, compare its own results for all values of the axis.
        in_one_column = tuple(replace(row, column="") for row in table.rows)
        best = best_of(table.rows, larger_epsilon(replace(table, rows=in_one_column)))

    def word(row: Row | None) -> str:
        if row is None:
            return DASH
        text = table.measure.shown(row.mean, row.std)
        return (bold(text) if row.label in best else text) + _marks(row, costly)

    body = [[name, *(word(at.get((name, column))) for column in columns)] for name in names]
    return ["method", *(f"{table.axis} {column}" for column in columns)], body


def shown_columns(head: Sequence[str], body: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Return the columns that fit into `width` characters, as a dict from column number to width.

    The name of a column and the name of a method may be broken between words. Other cells may not
    be broken.
    """
    border = 3
    left = width - 1
    shown: dict[int, int] = {}
    other = range(FIXED_COLUMNS, len(head))
    for i in (*IMPORTANCE[:2], *other, *IMPORTANCE[2:]):
        longest_word = max(len(word) for word in head[i].split())
        wanted = max([longest_word, *(len(line[i]) for line in body)])
        if i == 0:
            wanted = min(wanted, max(12, width // 3))
        left -= wanted + border
        if left < 0 and shown:
            break
        shown[i] = wanted
    return dict(sorted(shown.items()))

"""Tables of a comparison as CSV, JSON, Markdown and LaTeX. They hold nothing that varies between equal studies."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpfed.privacy.published import show_loss, show_percent

LARGER = 1.01  # calibrated figures of equal targets differ by less
DASH = "–"


@dataclass(frozen=True)
class Row:
    """One arm. Accuracies are those of the reported seeds, in their order; `reference` those of the arm it is compared with.

    epsilon    server_worst and third_party, None where there is no privacy
    failed     why there are no results
    """

    label: str
    row: str = ""
    column: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    tuning_runs: int = 0
    at_edge: bool = False
    accuracies: tuple[float, ...] = ()
    diverged: int = 0
    reference: tuple[float, ...] | None = None
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    guarantee: str = ""
    traffic: Mapping[str, int] | None = None
    failed: str | None = None

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.accuracies)) if self.accuracies else None

    @property
    def std(self) -> float | None:
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else None

    @property
    def difference(self) -> tuple[float, float | None] | None:
        """Mean paired difference to the reference, and half the width of its 95 % interval (none for one seed)."""
        if self.reference is None or not self.accuracies:
            return None
        return paired(self.accuracies, self.reference)


@dataclass(frozen=True)
class Table:
    """axis: what the columns of a grid are; reference: the name differences are taken against; notes: below the table."""

    title: str
    axis: str
    rows: tuple[Row, ...]
    reference: str | None = None
    notes: tuple[str, ...] = ()


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Mean difference over equal seeds and half the width of its 95 % t interval."""
    from scipy import stats

    gaps = np.asarray(ours) - np.asarray(theirs)
    if len(gaps) < 2:
        return float(gaps.mean()), None
    quantile = float(stats.t.ppf(0.975, len(gaps) - 1))
    return float(gaps.mean()), quantile * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))


def larger_epsilon(table: Table) -> set[str]:
    """Labels of arms that spend more than the cheapest arm of their column: they are not compared on equal terms."""
    out = set()
    for column in {row.column for row in table.rows}:
        spent = {
            r.label: e
            for r in table.rows
            if r.column == column and (e := r.epsilon.get("server_worst"))
        }
        out |= {label for label, value in spent.items() if value > LARGER * min(spent.values())}
    return out


def best_of(rows: Sequence[Row], without: set[str], least: int = 2) -> set[str]:
    """The highest mean among arms on equal terms, and ties of it; nobody's where fewer than `least` can be compared.

    Beside private arms those without privacy are not on equal terms."""
    scored = [row for row in rows if row.mean is not None]
    private = [row for row in scored if row.epsilon.get("server_worst") is not None]
    means = {row.label: row.mean or 0.0 for row in private or scored if row.label not in without}
    top = max(means.values(), default=0.0)
    return {label for label, mean in means.items() if mean == top} if len(means) >= least else set()


def records(table: Table) -> list[dict[str, Any]]:
    """Every arm as plain values, accuracies from 0 to 1: what CSV and JSON hold."""
    costly = larger_epsilon(table)
    out = []
    for row in table.rows:
        mean, half = row.difference or (None, None)
        interval = None if mean is None or half is None else [mean - half, mean + half]
        out.append(
            {
                "method": row.label,
                "row": row.row or row.label,
                "column": row.column,
                "rates": dict(row.rates),
                "tuning_runs": row.tuning_runs,
                "at_edge": row.at_edge,
                "seeds": len(row.accuracies),
                "accuracy": row.mean,
                "std": row.std,
                "accuracies": list(row.accuracies),
                "diverged": row.diverged,
                "difference": mean,
                "interval": interval,
                "epsilon": {k: row.epsilon.get(k) for k in ("server_worst", "third_party")},
                "larger_epsilon": row.label in costly,
                "guarantee": row.guarantee,
                "traffic": dict(row.traffic) if row.traffic else None,
                "failed": row.failed,
            }
        )
    return out


def to_json(table: Table) -> str:
    whole = {
        "title": table.title,
        "axis": table.axis,
        "reference": table.reference,
        "rows": records(table),
        "notes": list(table.notes),
    }
    return json.dumps(whole, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_csv(table: Table) -> str:
    """One line per arm; lists are joined by blanks, nested values have a column each."""
    out = io.StringIO()
    flat = [_flat(record) for record in records(table)]
    keys = list(dict.fromkeys(key for record in flat for key in record))
    writer = csv.DictWriter(out, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in record.items():
        if key == "rates":
            out["rates"] = " ".join(f"{name}={lr:g}" for name, lr in value.items())
        elif key == "interval":
            out["interval_low"], out["interval_high"] = value or (None, None)
        elif key == "traffic":
            out |= {
                part: (value or {}).get(part)
                for part in ("up_numbers", "up_bytes", "down_numbers", "down_bytes")
            }
        elif isinstance(value, Mapping):
            out |= {f"{key}_{part}": inner for part, inner in value.items()}
        else:
            out[key] = " ".join(str(v) for v in value) if isinstance(value, list) else value
    return out


def percent(mean: float | None, spread: float | None, sign: bool = False) -> str:
    if mean is None:
        return DASH
    text = show_percent(mean, 2, sign)
    return text if spread is None else f"{text} ± {show_percent(spread, 2)}"


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and body of the table of all arms, as words; marks refer to `footnotes`."""
    costly = larger_epsilon(table)
    head = [
        "method",
        "tuned",
        "tuning runs",
        "accuracy %",
        f"difference to {table.reference or 'reference'}",
    ]
    head += ["epsilon (server)", "epsilon (third party)", "up", "down"]
    body = []
    for row in table.rows:
        marks = [m for m, on in zip(MARKS, _flags(row, costly), strict=True) if on]
        mean, half = row.difference or (None, None)
        private = row.epsilon.get("server_worst") is not None
        body.append(
            [
                row.label + ("".join(f" {mark}" for mark in marks)),
                " ".join(f"{key} {lr:g}" for key, lr in row.rates.items()) or DASH,
                str(row.tuning_runs),
                percent(row.mean, row.std),
                percent(mean, half, sign=True),
                *(
                    show_loss(row.epsilon[view], 2)
                    if private
                    else ("no privacy" if row.accuracies else DASH)
                    for view in ("server_worst", "third_party")
                ),
                _traffic(row, "up"),
                _traffic(row, "down"),
            ]
        )
    return head, body


# Columns of `cells`, the most important first: a narrow screen shows the first ones.
IMPORTANCE = (0, 3, 4, 1, 5, 6, 2, 7, 8)


def shown_columns(head: Sequence[str], body: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Return the columns that fit into `width` letters, with their widths.

    A head may be broken between words, a cell may not, except the method's name.
    """
    border = 3
    widths = {}
    for i in IMPORTANCE:
        longest_word = max(len(word) for word in head[i].split())
        wanted = max([longest_word, *(len(line[i]) for line in body)])
        widths[i] = min(wanted, max(12, width // 3)) if i == 0 else wanted
    shown: list[int] = []
    left = width - 1
    for i in IMPORTANCE:
        left -= widths[i] + border
        if left < 0 and shown:
            break
        shown.append(i)
    return {i: widths[i] for i in sorted(shown)}


MARKS = ("†", "¶", "‡", "§")  # of `_flags`; an asterisk would begin a list in Markdown


def _flags(row: Row, costly: set[str]) -> tuple[bool, ...]:
    return row.label in costly, row.at_edge, row.diverged > 0, row.failed is not None


def footnotes(table: Table) -> list[str]:
    """The sentences of the marks that are used."""
    costly = larger_epsilon(table)
    used = [any(_flags(row, costly)[i] for row in table.rows) for i in range(len(MARKS))]
    sentences = [
        "spends a larger epsilon than others at the same noise, so it is not on equal terms (never in bold)",
        "the best rate is at the edge of what was tried, or none was better than one answer for all: a better one may lie outside",
        "has runs that diverged, which count as accuracy 0",
        "could not be run: "
        + "; ".join(f"{row.label}: {row.failed}" for row in table.rows if row.failed),
    ]
    return [f"{mark} {text}" for mark, text, on in zip(MARKS, sentences, used, strict=True) if on]


def _traffic(row: Row, way: str) -> str:
    if not row.traffic or f"{way}_numbers" not in row.traffic:
        return DASH
    return f"{row.traffic[f'{way}_numbers']:,} ({size(row.traffic[f'{way}_bytes'])})"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def grid(table: Table) -> tuple[list[str], list[list[Row | None]]] | None:
    """Column names and rows of arms, for a preset with an axis."""
    columns = list(dict.fromkeys(row.column for row in table.rows))
    if not table.axis:
        return None
    at = {(row.row, row.column): row for row in table.rows}
    names = list(dict.fromkeys(row.row for row in table.rows))
    return columns, [[at.get((name, column)) for column in columns] for name in names]


Bold = Callable[[str], str]


def grid_words(table: Table, bold: Bold) -> tuple[list[str], list[list[str]]] | None:
    found = grid(table)
    if found is None:
        return None
    columns, lines = found
    costly = larger_epsilon(table)
    names = list(dict.fromkeys(row.row for row in table.rows))
    best: set[str] = set()
    if len(names) > 1:
        for column in columns:
            best |= best_of([row for row in table.rows if row.column == column], costly)
    else:  # of one method the columns are compared
        best = best_of(
            table.rows,
            larger_epsilon(replace(table, rows=tuple(replace(r, column="") for r in table.rows))),
        )
    body = []
    for name, line in zip(names, lines, strict=True):
        words = [name]
        for row in line:
            text = DASH if row is None else percent(row.mean, row.std)
            marks = (
                ""
                if row is None
                else "".join(m for m, on in zip(MARKS, _flags(row, costly), strict=True) if on)
            )
            words.append((bold(text) if row is not None and row.label in best else text) + marks)
        body.append(words)
    return ["method", *(f"{table.axis} {column}" for column in columns)], body


def to_markdown(table: Table) -> str:
    parts = [f"# {table.title}"]
    laid_out = grid_words(table, lambda text: f"**{text}**")
    if laid_out is not None:
        parts.append(_pipes(*laid_out))
    head, body = cells(table)
    parts.append(_pipes(head, _emphasised(table, body, lambda text: f"**{text}**")))
    parts.append("\n".join(f"- {line}" for line in [*footnotes(table), *table.notes]))
    return "\n\n".join(parts) + "\n"


def _emphasised(table: Table, body: list[list[str]], bold: Bold) -> list[list[str]]:
    """The best arm's name and accuracy; with an axis the grid says which is best where."""
    best = set() if table.axis else best_of(table.rows, larger_epsilon(table))
    return [
        [bold(word) if row.label in best and i in (0, 3) else word for i, word in enumerate(line)]
        for row, line in zip(table.rows, body, strict=True)
    ]


def _pipes(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(word.replace("|", "\\|") for word in line) + " |" for line in lines
    )


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "|": r"\textbar{}",
    "¶": r"$^{\P}$", "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$", "§": r"$^{\S}$", "<": r"\textless{}",
    ">": r"\textgreater{}",
}  # fmt: skip


def escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def to_latex(table: Table) -> str:
    """A table environment for a paper; it needs \\usepackage{booktabs}."""

    def strong(text: str) -> str:
        return "\x00" + text + "\x01"  # marked before escaping, made bold after

    blocks = []
    laid_out = grid_words(table, strong)
    if laid_out is not None:
        blocks.append(_tabular(*laid_out))
    head, body = cells(table)
    blocks.append(_tabular(head, _emphasised(table, body, strong)))
    notes = r" \\ ".join(escape(line) for line in [*footnotes(table), *table.notes])
    lines = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering", r"\small"]
    lines += [rf"\caption{{{escape(table.title)}}}", "\n\n\\bigskip\n".join(blocks)]
    lines += ["", r"\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {notes}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _tabular(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(words: Sequence[str]) -> str:
        escaped = (escape(word).replace("\x00", r"\textbf{").replace("\x01", "}") for word in words)
        return " & ".join(escaped) + r" \\"

    spec = "l" + "c" * (len(head) - 1)
    rows = [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", line(head), r"\midrule", *map(line, body)]
    return "\n".join([*rows, r"\bottomrule", r"\end{tabular}"])

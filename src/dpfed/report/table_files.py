"""Comparison tables as CSV, JSON, Markdown and LaTeX text. Equal studies give identical text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dpfed.report.measures import ACCURACY, Measure
from dpfed.report.tables import (
    Row,
    Table,
    cells,
    emphasised,
    footnotes,
    grid_words,
    larger_epsilon,
)
from dpfed.training.callbacks.public_figures import FIGURES

TRAFFIC = ("up_numbers", "up_bytes", "down_numbers", "down_bytes")
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "–": "--", "|": r"\textbar{}", "¶": r"$^{\P}$", "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$",
    "§": r"$^{\S}$", "<": r"\textless{}", ">": r"\textgreater{}",
    # `to_latex` puts these two characters around bold words, and escaping turns them into
    # \textbf{...}. A \textbf in the text itself would be escaped.
    "\x00": r"\textbf{", "\x01": "}",
})  # fmt: skip


def records(table: Table) -> list[dict[str, Any]]:
    """Return each row of a table as a JSON-serialisable dict; accuracies are from 0 to 1."""
    costly = larger_epsilon(table)
    return [_record(row, table.measure, row.label in costly) for row in table.rows]


def _record(row: Row, measure: Measure, is_costly: bool) -> dict[str, Any]:
    mean, half = row.difference or (None, None)
    interval = None if mean is None or half is None else [mean - half, mean + half]
    other = {"other": dict(row.other)} if row.other else {}
    return {
        "method": row.label,
        "row": row.row or row.label,
        "column": row.column,
        "rates": dict(row.rates),
        "tuning_runs": row.tuning_runs,
        "at_edge": row.at_edge,
        "seeds": len(row.scores),
        measure.key: row.mean,
        "std": row.std,
        measure.values: list(row.scores),
        **other,
        "diverged": row.diverged,
        "difference": mean,
        "interval": interval,
        "epsilon": {view: row.epsilon.get(view) for view in FIGURES},
        "larger_epsilon": is_costly,
        "guarantee": row.guarantee,
        "traffic": dict(row.traffic) if row.traffic else None,
        "failed": row.failed,
    }


def to_json(table: Table) -> str:
    whole: dict[str, Any] = {
        "title": table.title,
        "axis": table.axis,
        "reference": table.reference,
        "rows": records(table),
        "notes": list(table.notes),
    }
    if table.measure is not ACCURACY:
        whole["measure"] = table.measure.key
    return json.dumps(whole, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_csv(table: Table) -> str:
    """Return the table as CSV, one line per row.

    The entries of a list are joined by blanks. A dictionary gets one column for each of its keys.
    """
    out = io.StringIO()
    lines = [_csv_line(record) for record in records(table)]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    writer = csv.DictWriter(out, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _csv_line(record: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in record.items():
        if key == "rates":
            out[key] = " ".join(f"{name}={lr:g}" for name, lr in value.items())
        elif key == "interval":
            out["interval_low"], out["interval_high"] = value or (None, None)
        elif key == "other":
            out |= value
        elif key == "traffic":
            out |= {part: (value or {}).get(part) for part in TRAFFIC}
        elif isinstance(value, dict):
            out |= {f"{key}_{part}": inner for part, inner in value.items()}
        elif isinstance(value, list):
            out[key] = " ".join(map(str, value))
        else:
            out[key] = value
    return out


def to_markdown(table: Table) -> str:
    def bold(text: str) -> str:
        return f"**{text}**"

    grid = grid_words(table, bold)
    head, body = cells(table)
    notes = "\n".join(f"- {line}" for line in [*footnotes(table), *table.notes])
    parts = [f"# {table.title}", *([_pipes(*grid)] if grid else [])]
    return "\n\n".join([*parts, _pipes(head, emphasised(table, body, bold)), notes]) + "\n"


def _pipes(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(word.replace("|", "\\|") for word in line) + " |" for line in lines
    )


def escape(text: str) -> str:
    """Return a text in which the special characters of LaTeX are escaped."""
    return text.translate(_LATEX)


def to_latex(table: Table) -> str:
    """Return the table as a LaTeX environment; the paper needs \\usepackage{booktabs}."""

    def bold(text: str) -> str:
        return f"\x00{text}\x01"

    grid = grid_words(table, bold)
    head, body = cells(table)
    blocks = [*([_tabular(*grid)] if grid else []), _tabular(head, emphasised(table, body, bold))]
    notes = r" \\ ".join(escape(line) for line in [*footnotes(table), *table.notes])
    lines = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering", r"\small"]
    lines += [rf"\caption{{{escape(table.title)}}}", "\n\n\\bigskip\n".join(blocks)]
    lines += ["", r"\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {notes}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _tabular(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(words: Sequence[str]) -> str:
        return " & ".join(map(escape, words)) + r" \\"

    spec = "l" + "c" * (len(head) - 1)
    rows = [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", line(head), r"\midrule", *map(line, body)]
    return "\n".join([*rows, r"\bottomrule", r"\end{tabular}"])

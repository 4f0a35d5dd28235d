"""Read from a run's result the texts that the language model wrote before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("prompt", "expected", "before", "after")
MOST_LETTERS = 300


def examples(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the generated texts of a run, each with its prompt and the expected text.

    Each text is put on one line. Damaged entries are left out. A long prompt is cut at its start,
    and any other long text at its end.
    """
    found = result.get("examples")
    if not isinstance(found, list):
        return []
    return [
        {name: _line(entry[name], at_end=name == "prompt") for name in COLUMNS}
        for entry in found
        if isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in COLUMNS)
    ]


def _line(text: str, at_end: bool) -> str:
    line = " ".join(text.split())
    if len(line) <= MOST_LETTERS:
        return line
    return f"… {line[-MOST_LETTERS:]}" if at_end else f"{line[:MOST_LETTERS]} …"

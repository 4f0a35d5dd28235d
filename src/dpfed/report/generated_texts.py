"""The texts of a run's result that its language model wrote before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("prompt", "expected", "before", "after")
MOST_LETTERS = 300


def examples(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the examples of a result, each text on one line; those of damaged files are left out.

    Of a long prompt its end remains, of another long text its beginning.
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

"""Words for messages: a number with its noun."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 client", "2,000 clients"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

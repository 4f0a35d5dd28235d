"""Progress inside a round and before the first one, for callbacks that show it.

Every count here is public or stays with the process that holds the records. The number of records
that a step draws is private, so progress is never counted in drawn records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    """`done` of `total` units of work, such as local steps; `round` is None outside a round."""

    name: str
    done: int
    total: int
    round: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.done:,} of {self.total:,}"


OnActivity = Callable[[Activity], None]


def ignore(activity: Activity) -> None:
    """Show nothing."""

"""The type `Activity`: the progress of work inside a round, or before the first round, for display.

An activity never counts the records of a drawn batch, because their number is private. Other counts
are public, or they stay in the process that has the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    """The progress of one kind of work, such as "local steps 3 of 20".

    name   name of the units of work, such as "local steps"
    done   number of completed units
    total  number of all units
    round  number of the round; None outside a round
    """

    name: str
    done: int
    total: int
    round: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.done:,} of {self.total:,}"


OnActivity = Callable[[Activity], None]


def ignore(activity: Activity) -> None:
    """Do nothing with an activity, for a run that does not display its progress."""

"""Compare the numbers of units that a client declares with the exact numbers in its data.

A unit is one record, or all records of one person. Only the client's operator sees the result. A
running client never compares the numbers, because a reaction to a difference would reveal something
about the exact numbers to the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfed.errors import DpfedError
from dpfed.federation.client_config import ClientConfig
from dpfed.federation.held_out import KEY, rows_of, split
from dpfed.training.job.data import configured_source


@dataclass(frozen=True)
class Declared:
    """A number of units that the client declares to the server, and the exact number in its data.

    key       setting in client.toml that declares the number
    declared  the declared number
    held      exact number in the client's data
    unit      "record", or the name of the column that defines units, such as patients
    """

    key: str
    declared: int
    held: int
    unit: str

    @property
    def advice(self) -> str:
        """One sentence of advice on the number to declare; "" if the declared number is good."""
        setting = f"{self.key} = {self.declared}"
        if self.held == 0:
            return f"{setting} but the client holds none: check [data] and the held-out settings"
        instead = f"declare a rounded-down figure, such as {rounded_down(self.held)}"
        if self.held < 10:
            instead = "no rounding hides a number below ten, so consider not taking part"
        if self.declared > self.held:
            return (
                f"{setting} is more than is held: epsilon holds, "
                f"but each step learns less than planned; {instead}"
            )
        if self.declared > rounded_down(self.held):
            return f"{setting} tells the server nearly the exact number: {instead}"
        if 2 * self.declared < self.held:
            return f"{setting} is less than half of what is held: {instead}"
        return ""


def compared(config: ClientConfig) -> list[Declared]:
    """Read the client's data, and return the declared and exact numbers of units.

    The list has an entry for the units to train on. If `policy.evaluate` is set, it also has an
    entry for the held-out units.
    """
    source = configured_source(config.data, config.model, "train")
    unit = config.data.unit_column
    state = Path(config.client.state)
    if config.client.held_out_share and not (state / KEY).exists():
        raise DpfedError(
            "the held-out records are drawn at the client's first start: run this after it"
        )
    trained, held_out = split(config, source.train, state)

    def units(rows: np.ndarray) -> int:
        column = rows_of(source.train, rows).column(unit)
        return len(rows) if column is None else len(np.unique(column))

    name = unit or "record"
    policy = config.policy
    numbers = [Declared("policy.records", policy.records, units(trained), name)]
    if policy.evaluate:
        numbers.append(Declared("policy.held_out", policy.held_out, units(held_out), name))
    return numbers


def rounded_down(count: int) -> int:
    """Return `count` rounded down to two significant digits; to one digit if it is below 100."""
    digits = 2 if count >= 100 else 1
    step = int(10 ** max(0, len(str(count)) - digits))
    return count // step * step

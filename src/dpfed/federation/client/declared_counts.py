"""What a client declares, compared with what it holds: for its operator's eyes only.

A running client never makes this comparison, because its behaviour would tell the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.federation.held_out import KEY, rows_of, split
from dpfed.federation.policy import ClientConfig


@dataclass(frozen=True)
class Declared:
    """A declared number of units (`key` = `declared`) and the exact number that is held."""

    key: str
    declared: int
    held: int
    unit: str

    @property
    def advice(self) -> str:
        """One sentence on what to declare, or an empty string."""
        if self.held == 0:
            return f"{self.key} = {self.declared} but the client holds none: check [data] and the held-out settings"
        instead = f"declare a rounded-down figure, such as {rounded_down(self.held)}"
        if self.held < 10:
            instead = "no rounding hides a number below ten, so consider not taking part"
        if self.declared > self.held:
            return (
                f"{self.key} = {self.declared} is more than is held: epsilon holds, "
                f"but each step learns less than planned; {instead}"
            )
        if self.declared > rounded_down(self.held):
            return (
                f"{self.key} = {self.declared} tells the server nearly the exact number: {instead}"
            )
        if 2 * self.declared < self.held:
            return f"{self.key} = {self.declared} is less than half of what is held: {instead}"
        return ""


def compared(config: ClientConfig, source: Source | None = None) -> list[Declared]:
    """Return each declared number of a client.toml beside the exact one; reads the client's data."""
    loader: Any = config.data
    found: Source = source or loader.load()
    unit = config.data.unit_column
    state = Path(config.client.state)
    if config.client.held_out_share and not (state / KEY).exists():
        raise DpfedError(
            "the held-out records are drawn at the client's first start: run this after it"
        )
    trained, held_out = split(config, found.train, state)

    def units(rows: np.ndarray) -> int:
        column = rows_of(found.train, rows).column(unit)
        return len(rows) if column is None else len(np.unique(column))

    name = unit or "record"
    out = [Declared("policy.records", config.policy.records, units(trained), name)]
    if config.policy.evaluate:
        out.append(Declared("policy.held_out", config.policy.held_out, units(held_out), name))
    return out


def rounded_down(count: int) -> int:
    """Return `count` rounded down to two significant digits, or to one below a hundred."""
    digits = 2 if count >= 100 else 1
    step = int(10 ** max(0, len(str(count)) - digits))
    return count // step * step

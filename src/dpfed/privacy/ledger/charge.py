"""One charge of the privacy ledger, and the row that stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from dpfed.privacy.ledger.storage import nameable
from dpfed.privacy.mechanism import Mechanism

Client = int | str


@dataclass(frozen=True)
class Charge:
    """The release of one client in one round: `steps` times the mechanism.

    noise  "seeded": a resumed run repeats the same numbers, so the same charge is the same row;
           "os": noise never repeats, so every attempt is a charge of its own
    void   True in the test mode of a real client: the row costs nothing
    part   separates releases of one round under different mechanisms ("train", "evaluate")
    """

    client: Client
    round: int
    steps: int
    mechanism: Mechanism
    noise: Literal["seeded", "os"]
    void: bool = False
    part: str = "train"

    def __post_init__(self) -> None:
        # Exact types: a bool or a numpy number would not be read back as it was hashed.
        numbers = (self.round, self.steps, self.mechanism.batches, self.mechanism.releases)
        if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers) or self.steps == 0:
            raise ValueError(
                "rounds count from 0; steps, batches and releases are whole numbers >= 1"
            )
        number = type(self.client) is int and -(2**63) <= self.client < 2**63
        if not (number or nameable(self.client)) or not nameable(self.part):
            raise ValueError(
                f"{self.client!r}, {self.part!r} cannot name a client and a part in the ledger"
            )
        if self.noise != "seeded" and (self.noise != "os" or self.void):
            raise ValueError(
                "noise is 'seeded' or 'os', and noise of the operating system is never void"
            )

    def columns(self) -> tuple[object, ...]:
        """Return the columns from `steps` to `void`, of the types that SQLite returns."""
        kind = self.mechanism
        # Adding 0.0 removes the sign of -0.0, which SQLite does not store.
        numbers = (float(kind.rate), float(kind.noise_multiplier) + 0.0)
        counts = (kind.batches, kind.releases)
        return (self.steps, kind.sampling, *numbers, *counts, self.noise, int(self.void))


@dataclass(frozen=True)
class Row:
    """A charge as it stands in the ledger; `txn` numbers the transactions (cohorts)."""

    seq: int
    txn: int
    run: str
    attempt: int
    charge: Charge
    time: float
    prev: str
    hash: str

    @classmethod
    def of(cls, columns: Sequence[Any]) -> Self:
        """Return the row of these columns, in the order of the table."""
        seq, txn, run, client, round_, part, attempt, steps = columns[:8]
        noise, void, time, prev, hash_ = columns[13:]
        mechanism = Mechanism(*columns[8:13])
        charge = Charge(client, round_, steps, mechanism, noise, bool(void), part)
        return cls(seq, txn, run, attempt, charge, time, prev, hash_)

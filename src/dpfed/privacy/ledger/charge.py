"""A charge (the privacy spending of one client in one round), and the ledger row that stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from dpfed.privacy.ledger.storage import nameable
from dpfed.privacy.mechanism import Mechanism

Client = int | str


@dataclass(frozen=True)
class Charge:
    """The privacy spending of one client in one round: `steps` executions of a mechanism.

    client     number of a simulated client, or name of a real one
    round      number of the round
    steps      how often the mechanism is executed
    mechanism  mechanism of one step
    noise      "seeded": a resumed run repeats the same noise, so a repeated charge adds no row;
               "os": noise never repeats, so every repetition is a new charge
    void       True if the charge is left out of the client's epsilon: a real client that runs with
               seeded noise has no privacy
    part       purpose of the noised values, "train" or "evaluate"; a round can have a charge for
               each
    """

    client: Client
    round: int
    steps: int
    mechanism: Mechanism
    noise: Literal["seeded", "os"]
    void: bool = False
    part: str = "train"

    def __post_init__(self) -> None:
        # Require the exact type int. SQLite would return a bool or a NumPy number as another type,
        # and the row would then have another hash.
        numbers = (self.round, self.steps, self.mechanism.batches, self.mechanism.releases)
        if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers) or self.steps == 0:
            raise ValueError(
                "rounds count from 0; steps, batches and releases are whole numbers >= 1"
            )
        is_number = type(self.client) is int and -(2**63) <= self.client < 2**63
        if not (is_number or nameable(self.client)) or not nameable(self.part):
            raise ValueError(
                f"{self.client!r}, {self.part!r} cannot name a client and a part in the ledger"
            )
        if self.noise != "seeded" and (self.noise != "os" or self.void):
            raise ValueError(
                "noise is 'seeded' or 'os', and noise of the operating system is never void"
            )

    def columns(self) -> tuple[object, ...]:
        """Return the values for the columns `steps` to `void` of the ledger's table `charge`.

        They have the types in which SQLite returns them.
        """
        kind = self.mechanism
        # Add 0.0, which turns -0.0 into 0.0. SQLite does not store the sign of -0.0, but the hash
        # of a row would contain it.
        numbers = (float(kind.rate), float(kind.noise_multiplier) + 0.0)
        counts = (kind.batches, kind.releases)
        return (self.steps, kind.sampling, *numbers, *counts, self.noise, int(self.void))


@dataclass(frozen=True)
class Row:
    """One row of a privacy ledger, which records one charge.

    seq      number of the row, from 1
    txn      number of the transaction; one transaction holds the charges of all clients of a round
    run      name of the run
    attempt  1 for the first charge of this client, round and part, 2 for the next, and so on
    charge   the privacy spending that the row records
    time     seconds since 1970 when the row was written
    prev     hash of the row before
    hash     hash of this row's content, including `prev`
    """

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
        """Build a row from the column values of the table `charge`, in the order of the table."""
        seq, txn, run, client, round_, part, attempt, steps = columns[:8]
        noise, void, time, prev, hash_ = columns[13:]
        mechanism = Mechanism(*columns[8:13])
        charge = Charge(client, round_, steps, mechanism, noise, bool(void), part)
        return cls(seq, txn, run, attempt, charge, time, prev, hash_)

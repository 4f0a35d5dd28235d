"""Add up several privacy ledgers of one institution: the spending of a record over several runs.

A record may be in every run, at any of its clients. Each run counts with the number of rounds that
its plan allows one client. This holds even if the run ended early, because the reason may be a
result on private data. A run that started from the weights of another run counts that run too, so
the sum is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.training.budget.recorded_spending import (
    is_run,
    own_ledger,
    own_spending,
    read_recorded_spending,
)
from dpfed.training.run_folder.files import LEDGER

NOT_STATED = "not stated"


@dataclass(frozen=True)
class LedgerSpending:
    """The privacy spending that one ledger records.

    path       the folder, as the user gave it
    owner      name of the run or of the client to which the ledger belongs
    created    time at which the ledger was created; it differs for all ledgers of one owner
    unit       protected unit; NOT_STATED in older ledgers of clients
    history    mechanisms and steps that bound the spending of every record
    delta      delta of the ledger's guarantee
    epsilon    epsilon of this ledger alone, at its own delta
    seeded     True if some of its noise was repeatable, which protects nothing
    uncounted  True if it began with weights whose spending is not known
    """

    path: Path
    owner: str
    created: float
    unit: str
    history: tuple[tuple[Mechanism, int], ...]
    delta: float
    epsilon: float
    seeded: bool
    uncounted: bool = False

    @property
    def adjacency(self) -> str | None:
        return self.history[0][0].adjacency if self.history else None


@dataclass(frozen=True)
class SiteSpending:
    """The largest privacy spending of one record over several ledgers together, at one delta."""

    ledgers: tuple[LedgerSpending, ...]
    epsilon: float
    delta: float
    unit: str
    adjacency: str | None


def read_site_spending(folders: Sequence[Path]) -> SiteSpending:
    """Verify the ledgers in these folders and return the privacy spending of a record in all.

    The result has the smallest delta of all ledgers.

    folders  folders of runs, or state folders of clients
    """
    ledgers = tuple(map(_read, folders))
    _refuse_copies(ledgers)
    _refuse_unequal(ledgers)
    history = [entry for ledger in ledgers for entry in ledger.history]
    delta = min(ledger.delta for ledger in ledgers)
    total = epsilon(history, delta) if history else 0.0
    adjacency = next((found for each in ledgers if (found := each.adjacency)), None)
    return SiteSpending(ledgers, total, delta, ledgers[0].unit, adjacency)


def _read(folder: Path) -> LedgerSpending:
    own = own_ledger(folder)
    if own is not None:
        return _of_client(folder, own)
    if is_run(folder):
        return _of_run(folder)
    raise DpfedError(f"{folder} has no ledger: give folders of runs, or state folders of clients")


def _of_client(folder: Path, path: Path) -> LedgerSpending:
    spending = own_spending(path)
    with Ledger.open(path, readonly=True) as ledger:
        history = ledger.history(spending.client)
        meta = ledger.meta
    return LedgerSpending(
        path=folder,
        owner=spending.client,
        created=float(meta["created"]),
        unit=str(meta.get("unit", NOT_STATED)),
        history=tuple(history),
        delta=spending.delta,
        epsilon=spending.epsilon,
        seeded=spending.void > 0,
    )


def _of_run(folder: Path) -> LedgerSpending:
    spending = read_recorded_spending(folder)
    if spending.served:
        raise DpfedError(
            f"{folder} is a server's run, whose clients keep their own ledgers: "
            "give the state folder of a client"
        )
    with Ledger.open(folder / LEDGER, readonly=True) as ledger:
        meta = ledger.meta
    planned = spending.realised
    return LedgerSpending(
        path=folder,
        owner=str(meta["owner"]),
        created=float(meta["created"]),
        unit=planned.unit,
        history=tuple(planned.bound),
        delta=planned.delta,
        epsilon=epsilon(planned.bound, planned.delta),
        seeded=spending.seeded,
        uncounted=planned.uncounted,
    )


def _refuse_copies(ledgers: Sequence[LedgerSpending]) -> None:
    """Raise DpfedError if two of the ledgers are copies of the same ledger."""
    seen: dict[tuple[str, float], Path] = {}
    for ledger in ledgers:
        identity = (ledger.owner, ledger.created)
        if identity in seen:
            raise DpfedError(
                f"{seen[identity]} and {ledger.path} hold the same ledger: give it once"
            )
        seen[identity] = ledger.path


def _refuse_unequal(ledgers: Sequence[LedgerSpending]) -> None:
    """Raise DpfedError if the epsilons of two ledgers have different meanings.

    Their protected units differ, or their neighbouring data sets (adjacency).
    """
    first, *others = ledgers
    for ledger in others:
        if NOT_STATED in (first.unit, ledger.unit):
            unknown = first if first.unit == NOT_STATED else ledger
            raise DpfedError(
                f"the ledger in {unknown.path} does not state its protected unit, as an earlier "
                "version wrote it: it cannot be added to others"
            )
        if ledger.unit != first.unit:
            raise DpfedError(
                f"{first.path} protects one {first.unit} and {ledger.path} one {ledger.unit}: "
                "spendings of different units cannot be added"
            )
    known = [ledger for ledger in ledgers if ledger.adjacency is not None]
    for ledger in known[1:]:
        if ledger.adjacency != known[0].adjacency:
            raise DpfedError(
                f"{known[0].path} is accounted for under {known[0].adjacency!r} and {ledger.path} "
                f"under {ledger.adjacency!r}: spendings of different adjacency cannot be added"
            )

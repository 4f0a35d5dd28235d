"""Divide records among clients. No record belongs to two clients, or twice to one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dpfed.config import DataSection
from dpfed.data.columns import is_missing
from dpfed.data.tables import Table
from dpfed.errors import DpfedError, phrase


@dataclass(frozen=True)
class Shards:
    """The records of each client, grouped by protected unit, as index arrays.

    A unit is what privacy protects: one record, or all records of one person at this client.

    clients  bounds of clients: client i has the units `clients[i]` to `clients[i+1] - 1`
    units    bounds of units: unit u has the records `records[units[u] : units[u+1]]`
    records  indices of the records, sorted by client and unit
    names    name of each client in the client column; empty for simulated clients
    """

    clients: np.ndarray
    units: np.ndarray
    records: np.ndarray
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.clients) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of protected units of each client."""
        return np.diff(self.clients)

    def of(self, client: int) -> np.ndarray:
        """Return the indices of all records of a client."""
        first = self.units[self.clients[client]]
        return self.records[first : self.units[self.clients[client + 1]]]

    def slots(self, client: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the record indices of some units of a client, and the number of records per unit.

        The indices of one unit's records are next to each other.

        positions  the units to look up, numbered from 0 within this client
        """
        unit = self.clients[client] + positions
        counts = self.units[unit + 1] - self.units[unit]
        if len(counts) == 0 or counts.max() == 1:
            return self.records[self.units[unit]], counts
        starts = np.repeat(self.units[unit] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        return self.records[starts + np.arange(counts.sum())], counts


def shards_of(owner: np.ndarray, clients: int, units: np.ndarray | None = None) -> Shards:
    """Group the records by client and by protected unit (one record, or all records of one person).

    owner    number of each record's client; -1 for an unused record
    clients  number of clients
    units    name of each record's protected unit; None if each record is a unit
    """
    used = np.flatnonzero(owner >= 0)
    within = np.zeros(len(owner), dtype=np.int64)
    if units is not None:
        within = np.unique(units, return_inverse=True)[1]
    order = used[np.lexsort((used, within[used], owner[used]))]
    holder = owner[order]
    first = np.ones(len(order), dtype=bool)
    if units is not None and len(order):
        first[1:] = (holder[1:] != holder[:-1]) | (within[order][1:] != within[order][:-1])
    starts = np.flatnonzero(first)
    bounds = np.searchsorted(holder[starts], np.arange(clients + 1))
    empty = np.flatnonzero(np.diff(bounds) == 0)
    if len(empty):
        raise DpfedError(
            f"client {empty[0]} has no records ({len(empty)} of {clients} clients are empty): "
            'use fewer clients, a larger data.alpha, or partition = "dirichlet_equal"'
        )
    return Shards(bounds.astype(np.int64), np.append(starts, len(order)).astype(np.int64), order)


def iid(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Return each record's client. Records are assigned at random, equally many to each client.

    Records that cannot be divided equally stay unused (-1). `alpha` has no effect.
    """
    size = len(labels) // clients
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[rng.permutation(len(labels))[: size * clients]] = np.repeat(np.arange(clients), size)
    return owner


def dirichlet_equal(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Return each record's client, so that clients have equally many records but different classes.

    Client i draws its class probabilities p_i from a Dirichlet distribution Dir(alpha). If a class
    has no records left, p_i is renormalised over the other classes. Records that cannot be divided
    equally stay unused (-1).
    """
    classes = int(labels.max()) + 1
    size = len(labels) // clients
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    remaining = np.array([len(pool) for pool in pools])
    owner = np.full(len(labels), -1, dtype=np.int64)
    for client in range(clients):
        class_shares = _dirichlet(rng, alpha, classes)
        missing_records = size
        while missing_records:
            p = np.where(remaining > 0, class_shares, 0.0)
            p = (remaining > 0) / (remaining > 0).sum() if p.sum() < 1e-300 else p / p.sum()
            drawn = np.minimum(rng.multinomial(missing_records, p), remaining)
            for c in np.flatnonzero(drawn):
                owner[pools[c][remaining[c] - drawn[c] : remaining[c]]] = client
            remaining -= drawn
            missing_records -= int(drawn.sum())
    return owner


def dirichlet_classwise(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Return each record's client. The records of each class are divided by Dir(alpha).

    Dir(alpha) is the Dirichlet distribution. Clients have different numbers of records, as in Hsu,
    Qi and Brown 2019.
    """
    owner = np.full(len(labels), -1, dtype=np.int64)
    for c in range(int(labels.max()) + 1):
        pool = rng.permutation(np.flatnonzero(labels == c))
        ends = np.cumsum(_dirichlet(rng, alpha, clients))[:-1]
        cuts = (ends * len(pool)).round().astype(np.int64)
        for client, part in enumerate(np.split(pool, cuts)):
            owner[part] = client
    return owner


def _dirichlet(rng: np.random.Generator, alpha: float, length: int) -> np.ndarray:
    """Return a draw of the Dirichlet distribution Dir(alpha): `length` shares that add up to 1.

    If numpy's draw overflows or underflows, return the limit of Dir(alpha). The limit is equal
    shares for a large alpha, and a single share of 1 for a small alpha.
    """
    p = rng.dirichlet(np.full(length, alpha))
    if np.isfinite(p).all() and p.sum() > 0:
        return p
    if alpha > 1:
        return np.full(length, 1 / length)
    one_class: np.ndarray = np.eye(length)[rng.integers(length)]
    return one_class


RULES: dict[str, Callable[[np.ndarray, int, float, np.random.Generator], np.ndarray]] = {
    "dirichlet_equal": dirichlet_equal,
    "dirichlet_classwise": dirichlet_classwise,
    "iid": iid,
}


def _key_column(what: str, column: np.ndarray | None) -> np.ndarray | None:
    """Return a column of client or unit names after a check; None if `column` is None.

    Raise DpfedError for missing values and for texts mixed with numbers. `what` is "client" or
    "unit".
    """
    if column is None or column.dtype.kind not in "fO":
        return column
    missing = [i for i, value in enumerate(column.tolist()) if is_missing(value)]
    if missing:
        raise DpfedError(
            f"record {missing[0]} has no {what}: data.{what}_column is empty or NaN there"
        )
    if column.dtype.kind == "O" and len({isinstance(value, str) for value in column}) > 1:
        raise DpfedError(f"data.{what}_column must hold texts or numbers, not both")
    return column


def partition(section: DataSection, table: Table, rng: np.random.Generator) -> Shards:
    """Divide the records of a table among clients and units, as the `[data]` section describes.

    The keys are `data.partition`, `data.client_column` and `data.unit_column`.
    """
    owners = _key_column("client", table.column(section.client_column))
    units = _key_column("unit", table.column(section.unit_column))
    if section.partition == "natural":
        if owners is None:
            raise DpfedError(
                'partition = "natural" needs data.client_column, '
                "the column that names each record's client"
            )
        names, owner = np.unique(owners, return_inverse=True)
        return replace(shards_of(owner, len(names), units), names=tuple(map(str, names)))
    clients = section.clients
    if clients > len(table):
        raise DpfedError(
            f"{phrase('clients')} = {clients} is more than the {len(table)} records there are"
        )
    owner = RULES[section.partition](table.class_numbers, clients, section.alpha, rng)
    return shards_of(owner, clients, units)

"""Who holds which record. Every partition is disjoint: no record belongs to two clients, or twice to one (SPEC 1.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dpfed.data.columns import is_missing
from dpfed.errors import DpfedError, phrase


@dataclass(frozen=True)
class Shards:
    """client -> protected units -> records, as index arrays that do not grow with anything but the data.

    The units of client i are `clients[i]..clients[i+1]`; the records of unit u are
    `records[units[u]]..records[units[u+1]]`. Usually a unit is one record.
    `names` are the values of the client column, none if the clients are simulated.
    """

    clients: np.ndarray
    units: np.ndarray
    records: np.ndarray
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.clients) - 1

    @property
    def sizes(self) -> np.ndarray:
        """R_i, in protected units."""
        return np.diff(self.clients)

    def of(self, client: int) -> np.ndarray:
        """All records of a client."""
        return self.records[self.units[self.clients[client]] : self.units[self.clients[client + 1]]]

    def slots(self, client: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Record indices of the chosen units, and how many belong to each unit."""
        unit = self.clients[client] + positions
        counts = self.units[unit + 1] - self.units[unit]
        if len(counts) == 0 or counts.max() == 1:
            return self.records[self.units[unit]], counts
        starts = np.repeat(self.units[unit] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        return self.records[starts + np.arange(counts.sum())], counts


def shards_of(owner: np.ndarray, clients: int, units: np.ndarray | None = None) -> Shards:
    """From the owner of each record (-1: unused) and, where given, the unit that each record belongs to."""
    used = np.flatnonzero(owner >= 0)
    within = (
        np.zeros(len(owner), dtype=np.int64)
        if units is None
        else np.unique(units, return_inverse=True)[1]
    )
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
            f"client {empty[0]} has no records ({len(empty)} of {clients} clients are empty): use fewer clients, "
            'a larger data.alpha, or partition = "dirichlet_equal"'
        )
    return Shards(bounds.astype(np.int64), np.append(starts, len(order)).astype(np.int64), order)


def iid(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Equal sizes, records dealt at random; the remainder stays unused."""
    size = len(labels) // clients
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[rng.permutation(len(labels))[: size * clients]] = np.repeat(np.arange(clients), size)
    return owner


def dirichlet_equal(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Client i draws its labels from p_i ~ Dir(alpha), renormalised over classes that still have records; all sizes equal."""
    classes = int(labels.max()) + 1
    size = len(labels) // clients
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    left = np.array([len(pool) for pool in pools])
    owner = np.full(len(labels), -1, dtype=np.int64)
    for client in range(clients):
        mix = _dirichlet(rng, alpha, classes)
        need = size
        while need:
            p = np.where(left > 0, mix, 0.0)
            p = (left > 0) / (left > 0).sum() if p.sum() < 1e-300 else p / p.sum()
            take = np.minimum(rng.multinomial(need, p), left)
            for c in np.flatnonzero(take):
                owner[pools[c][left[c] - take[c] : left[c]]] = client
            left -= take
            need -= int(take.sum())
    return owner


def dirichlet_classwise(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Each class is split over clients by its own Dir(alpha) (Hsu, Qi, Brown 2019); sizes differ."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    for c in range(int(labels.max()) + 1):
        pool = rng.permutation(np.flatnonzero(labels == c))
        cuts = (
            (np.cumsum(_dirichlet(rng, alpha, clients))[:-1] * len(pool)).round().astype(np.int64)
        )
        for client, part in enumerate(np.split(pool, cuts)):
            owner[part] = client
    return owner


def _dirichlet(rng: np.random.Generator, alpha: float, length: int) -> np.ndarray:
    """Dir(alpha) also where its gamma draws all underflow to zero (one class takes all) or overflow (equal shares)."""
    p = rng.dirichlet(np.full(length, alpha))
    if np.isfinite(p).all() and p.sum() > 0:
        return p
    return np.full(length, 1 / length) if alpha > 1 else np.eye(length)[rng.integers(length)]


RULES: dict[str, Callable[[np.ndarray, int, float, np.random.Generator], np.ndarray]] = {
    "dirichlet_equal": dirichlet_equal,
    "dirichlet_classwise": dirichlet_classwise,
    "iid": iid,
}


def _key_column(what: str, column: np.ndarray | None) -> np.ndarray | None:
    """Return a column of client or unit names; refuse missing values and mixed types."""
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


def partition(
    labels: np.ndarray,
    clients: int,
    rule: str,
    alpha: float,
    rng: np.random.Generator,
    owners: np.ndarray | None = None,
    units: np.ndarray | None = None,
) -> Shards:
    """The shards of a data set. `owners` (a column of client names) is used by `rule = "natural"`."""
    owners = _key_column("client", owners)
    units = _key_column("unit", units)
    if rule == "natural":
        if owners is None:
            raise DpfedError(
                'partition = "natural" needs data.client_column, the column that names each record\'s client'
            )
        names, owner = np.unique(owners, return_inverse=True)
        return replace(
            shards_of(owner, len(names), units), names=tuple(str(name) for name in names)
        )
    if clients > len(labels):
        raise DpfedError(
            f"{phrase('clients')} = {clients} is more than the {len(labels)} records there are"
        )
    return shards_of(RULES[rule](labels, clients, alpha, rng), clients, units)

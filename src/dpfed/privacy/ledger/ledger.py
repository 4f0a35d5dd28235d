"""The privacy ledger: an append-only SQLite file of all that was charged, one per run or per real client.

Beside `ledger.db` lie `ledger.db.head` (row count and hash after the last charge, so that an old copy put
back in its place is noticed) and `ledger.db.lock` (held by the one writer). The order for every cohort:

    commit the rows, synced -> replace the head file, synced -> charge() returns -> noised values may leave

A process killed anywhere leaves a ledger at most one transaction ahead of its head file, and never behind it.
The chain has no key: whoever rewrites both files consistently is caught only by a head that is kept elsewhere
(`check_head`; in a federation the server echoes it).
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, Self

from dpfed.privacy.ledger.storage import (
    FORMAT,
    Head,
    beside,
    build_file,
    canonical,
    check_vacant,
    connect,
    ledger_error,
    nameable,
    owner_of,
    pending,
    plainly,
    read_head,
    read_meta,
    restrict,
    row_hash,
    take_lock,
    trusted,
    write_head,
)
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.private_files import fsync

Client = int | str
Pathlike = str | os.PathLike[str]
History = list[tuple[Mechanism, int]]

MECHANISM = "sampling, rate, noise_multiplier, batches, releases"


@dataclass(frozen=True)
class Charge:
    """What one client is about to release in one round: `steps` times the mechanism.

    noise  "seeded": a resumed run repeats the same numbers, so the same charge again is the same row;
           "os": noise that never comes twice, so every attempt is a charge of its own
    void   test mode of a real client: recorded, but no spending
    part   tells apart what a client releases in one round under different mechanisms ("train", "evaluate")
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


@dataclass(frozen=True)
class Row:
    """One charge as it stands in the ledger; `txn` numbers the transactions (cohorts)."""

    seq: int
    txn: int
    run: str
    attempt: int
    charge: Charge
    time: float
    prev: str
    hash: str


class Ledger:
    """Made by `create` or `open`; a context manager, to be used by one thread at a time."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, lock: IO[bytes] | None, meta: str
    ) -> None:
        self.path, self._db, self._lock = path, db, lock
        self.meta: dict[str, Any] = json.loads(meta)
        self._genesis = hashlib.sha256(meta.encode()).hexdigest()  # what the first row follows
        self._synced: Head | None = (
            None  # what the head file says; None: find out before the next charge
        )

    @classmethod
    def create(
        cls, path: Pathlike, *, run: str | None = None, client: str | None = None, **meta: object
    ) -> Self:
        """A new ledger of one `run` (with all its clients) or of one real `client` (with all its runs).

        meta: anything JSON can hold that should stand in it for good, such as delta or the plan's hash.
        """
        path = Path(path).resolve()
        kind, owner = owner_of(run, client)
        meta |= {
            "format": FORMAT,
            "kind": kind,
            "owner": owner,
            "created": time.time(),
            "dpfed": "unknown",
        }
        with suppress(metadata.PackageNotFoundError):
            meta["dpfed"] = metadata.version("dpfed")
        text = canonical(meta)
        with plainly(path):
            check_vacant(path)
            with take_lock(path):
                check_vacant(path)
                build_file(path, text)
        return cls.open(path)

    @classmethod
    def open(
        cls, path: Pathlike, *, run: str | None = None, client: str | None = None,
        readonly: bool = False, accept_missing_head: bool = False,
    ) -> Self:  # fmt: skip
        """An existing ledger, refused if it is not the one expected or if it is older than its head file.

        Nothing on disk changes before all checks have passed. Since clients open it for every message, the
        chain is checked only from the head file's row on: call `verify` where a run or a report begins.
        """
        path = Path(path).resolve()
        owner = None if run is client is None else owner_of(run, client)
        with plainly(path), ExitStack() as on_failure:
            meta = read_meta(path, owner)
            lock = None if readonly else on_failure.enter_context(take_lock(path))
            # Before the rows; the other way round a writer at work would look like a ledger put back.
            head = read_head(path)
            with closing(connect(path, "mode=ro" if pending(path) else "immutable=1")) as look:
                cls(path, look, None, meta)._check_rows(head, not readonly, accept_missing_head)
            db = on_failure.enter_context(
                closing(connect(path, "mode=ro" if readonly else "mode=rw"))
            )
            ledger = cls(path, db, lock, meta)
            if not readonly:
                restrict(path)
                ledger._begin_writing(accept_missing_head)
            on_failure.pop_all()
        return ledger

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def charge(self, charges: Sequence[Charge], run: str | None = None) -> list[Row]:
        """Charges a cohort in one transaction; when this returns, not before, its noised values may leave.

        After an error nothing may leave, and what did reach the disk is spent. `run` is needed only in a
        client's ledger. Returns the row of each charge, new or (seeded, same content) found again.
        """
        run = self._run_for(charges, run)
        with plainly(self.path):
            if self._synced is None:
                self._settle(accept_missing_head=False)
            before, self._synced = self._synced, None
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if self._last() != before:
                    raise ledger_error(
                        self.path, "something else has written to it while it was in use"
                    )
                rows = self._append(charges, run)
                head = self._last()
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    with suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
            if head != before:
                write_head(self.path, head)
            self._synced = head
        return rows

    def _run_for(self, charges: Sequence[Charge], run: str | None) -> str:
        """The run that is charged; a ledger takes charges of its owner only."""
        kind, owner = self.meta["kind"], self.meta["owner"]
        if self._lock is None:
            raise ledger_error(self.path, "it is not open for writing in this process")
        run = owner if run is None and kind == "run" else run
        once = len({(c.client, c.round, c.part) for c in charges}) == len(charges)
        if run is None or not nameable(run) or not once:
            raise ValueError(
                "a cohort names its run, and charges each client's part of a round once"
            )
        if run != owner if kind == "run" else any(c.client != owner for c in charges):
            raise ledger_error(self.path, f"it takes charges of {kind} {owner!r} only")
        return run

    def _append(self, charges: Sequence[Charge], run: str) -> list[Row]:
        head, now, rows = self._last(), time.time(), []
        txn = 1 + (self._value("SELECT txn FROM charge WHERE seq = ?", head.rows) or 0)
        same = "FROM charge WHERE run = ? AND client = ? AND round = ? AND part = ?"
        for c in charges:
            key = (run, c.client, c.round, c.part)
            found = None  # fresh noise is always a new charge
            if c.noise == "seeded":
                found = self._db.execute(f"SELECT * {same} AND noise = 'seeded'", key).fetchone()
            if found is not None:
                rows.append(self._row(found))
                if rows[-1].charge != c:
                    what = f"row {found[0]} charges client {c.client} in round {c.round} otherwise than now"
                    raise ledger_error(
                        self.path, f"{what}, it was written with another configuration"
                    )
                continue
            m, attempt = (
                c.mechanism,
                1 + self._value(f"SELECT COALESCE(MAX(attempt), 0) {same}", *key),
            )
            # As floats without the sign of -0.0, because that is how SQLite gives them back to be hashed.
            mechanism = (
                m.sampling,
                float(m.rate),
                float(m.noise_multiplier) + 0.0,
                m.batches,
                m.releases,
            )
            spent = (c.steps, *mechanism, c.noise, int(c.void))
            row = (head.rows + 1, txn, *key, attempt, *spent, now, head.hash)
            head = Head(head.rows + 1, row_hash(row))
            self._db.execute(f"INSERT INTO charge VALUES ({'?,' * len(row)}?)", (*row, head.hash))
            rows.append(self._row((*row, head.hash)))
        return rows

    def _begin_writing(self, accept_missing_head: bool) -> None:
        if pending(self.path):
            # Rows of a killed process may not be on the disk yet, and a replay that finds them relies on them.
            fsync(beside(self.path, "-wal"))
        if self._value("PRAGMA journal_mode = WAL") != "wal":
            raise ledger_error(
                self.path, "the file system does not support SQLite's write-ahead log"
            )
        self._settle(accept_missing_head)
        _writers.add(self)

    def _settle(self, accept_missing_head: bool) -> None:
        """Brings the head file up to the ledger, after a crash or a failed write between the two."""
        head = read_head(self.path)
        found = self._check_rows(head, True, accept_missing_head)
        if found != head:
            write_head(self.path, found)
        self._synced = found

    def head(self) -> Head:
        with plainly(self.path):
            return self._last()

    def check_head(self, head: tuple[int, str]) -> None:
        """Refuses if this ledger does not continue the one that had this head, e.g. if it is an old copy."""
        with plainly(self.path):
            last, (rows, hash_) = self._last(), head
            if last.rows < rows:
                what = f"row {last.rows + 1} is missing, it has had {rows} rows"
                raise ledger_error(
                    self.path, f"{what}; an old copy forgets what was spent, put back the newest"
                )
            if self._hash_at(rows) != hash_:
                raise ledger_error(self.path, f"row {rows} is not the row that its head remembers")

    def verify(self) -> Head:
        """Recomputes the whole chain; an error names the first row that is wrong."""
        with plainly(self.path):
            remembered = read_head(self.path)  # before the rows, as in open
            self._db.execute("BEGIN")
            try:
                head = self._walk(after=0)
                self.check_head(remembered or head)
                if self._value("PRAGMA integrity_check(1)") != "ok":
                    raise ledger_error(
                        self.path, "the file is damaged, put back the newest copy of it"
                    )
            finally:
                self._db.execute("ROLLBACK")
        return head

    def rows(self, after: int = 0) -> Iterator[Row]:
        """Rows in order, read as they are asked for, beginning after the given row number."""
        with plainly(self.path):
            for row in self._db.execute(
                "SELECT * FROM charge WHERE seq > ? ORDER BY seq", (after,)
            ):
                yield self._row(row)

    def clients(self) -> list[Client]:
        """Everyone with at least one row, void or not, in order of the first."""
        return [
            row[0]
            for row in self._query("SELECT client FROM charge GROUP BY client ORDER BY MIN(seq)")
        ]

    def last_round(self, run: str, part: str = "train") -> int:
        """The last round of a run that this part was charged for, void or not; 0 for none."""
        query = "SELECT COALESCE(MAX(round), 0) FROM charge WHERE run = ? AND part = ?"
        return int(self._query(query, run, part)[0][0])

    def participation(self, *, void: bool = False) -> dict[Client, int]:
        """In how many rounds each client was charged; a repeated round counts once here."""
        rounds = (
            "SELECT client, MIN(seq) AS s FROM charge WHERE void = ? GROUP BY client, run, round"
        )
        return dict(
            self._query(
                f"SELECT client, COUNT(*) FROM ({rounds}) GROUP BY client ORDER BY MIN(s)", void
            )
        )

    def history(self, client: Client, *, void: bool = False) -> History:
        """What the client has spent: each mechanism with its number of steps, all attempts counted."""
        return self._merged("AND client = ?", void, client).get(client, [])

    def histories(self, *, void: bool = False) -> dict[Client, History]:
        """`history` of every client that has one, in order of the first charge."""
        return self._merged("", void)

    def _merged(self, where: str, *values: object) -> dict[Client, History]:
        groups = (
            f"FROM charge WHERE void = ? {where} GROUP BY client, {MECHANISM} ORDER BY MIN(seq)"
        )
        found: dict[Client, History] = {}
        for seq, client, *fields, steps in self._query(
            f"SELECT MIN(seq), client, {MECHANISM}, SUM(steps) {groups}", *values
        ):
            with trusted(self.path, seq):
                found.setdefault(client, []).append((Mechanism(*fields), steps))
        return found

    def _query(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with plainly(self.path):
            return self._db.execute(query, values).fetchall()

    def _value(self, query: str, *values: object) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def _row(self, row: tuple[Any, ...]) -> Row:
        (
            seq,
            txn,
            run,
            client,
            round_,
            part,
            attempt,
            steps,
            *fields,
            noise,
            void,
            when,
            prev,
            hash_,
        ) = row
        with trusted(self.path, seq):
            charge = Charge(client, round_, steps, Mechanism(*fields), noise, bool(void), part)
        return Row(seq, txn, run, attempt, charge, when, prev, hash_)

    def _last(self) -> Head:
        row = self._db.execute("SELECT seq, hash FROM charge ORDER BY seq DESC LIMIT 1").fetchone()
        return Head(0, self._genesis) if row is None else Head(*row)

    def _hash_at(self, seq: int) -> Any:
        return self._value("SELECT hash FROM charge WHERE seq = ?", seq) if seq else self._genesis

    def _walk(self, after: int) -> Head:
        """Recomputes the chain from the row after `after` to the end."""
        head = Head(after, self._hash_at(after))
        start = (
            after + 1 if after else -(2**63)
        )  # rows below number 1 can only be forged, and must not hide
        for row in self._db.execute("SELECT * FROM charge WHERE seq >= ? ORDER BY seq", (start,)):
            seq = head.rows + 1
            if row[0] != seq:
                raise ledger_error(self.path, f"row {min(seq, row[0])} is missing or out of place")
            if row_hash(row[:-1]) != row[-1]:
                raise ledger_error(
                    self.path, f"row {seq} was edited, its hash does not fit its content"
                )
            if row[-2] != head.hash:
                raise ledger_error(
                    self.path, f"row {seq} does not follow the row before it, the chain is broken"
                )
            head = Head(seq, row[-1])
        return head

    def _check_rows(self, head: Head | None, writing: bool, accept_missing_head: bool) -> Head:
        """The ledger against its head file: not older, and newer only by what a crash explains."""
        accept = "Ledger.open(..., accept_missing_head=True)"
        if head is None:
            if self._last().rows and not accept_missing_head:
                what = "its head file is missing, so an old copy could not be told from the newest"
                raise ledger_error(
                    self.path, f"{what}; put it back, or accept the ledger as it is with {accept}"
                )
            return self._walk(after=0)
        self.check_head(head)
        ahead = self._value("SELECT COUNT(DISTINCT txn) FROM charge WHERE seq > ?", head.rows)
        if writing and ahead > 1:  # a reader may find more, made after it had read the head file
            what = f"its head file is {ahead} transactions behind, which no crash explains"
            raise ledger_error(
                self.path, f"{what}; if the ledger is the newest, delete that file and use {accept}"
            )
        return self._walk(after=max(head.rows - 1, 0))


_writers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked worker shares the lock, and would keep it after its parent was killed.
    for ledger in list(_writers):
        if ledger._lock is not None:
            ledger._lock.close()
            ledger._lock = None


os.register_at_fork(after_in_child=_release_in_child)

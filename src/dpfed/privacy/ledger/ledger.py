"""The privacy ledger: an append-only SQLite file of all charges of one run or one real client.

Two files lie beside `ledger.db`. `ledger.db.head` stores the number of rows and the hash of the
last row, so that an old copy of the ledger is noticed. The one process that may write holds a lock
on `ledger.db.lock`. The clients of a round are charged in this order:

    rows are on disk -> head file is on disk -> charge() returns -> noised values may be released

After a crash the ledger is at most one transaction ahead of its head file, and never behind it.
Each row's hash covers the hash of the row before, but without a secret key. If someone changes
ledger and head file consistently, only a copy of the head elsewhere reveals it (`check_head`). In a
federation the server stores such a copy and sends it to the client.
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
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Self

from dpfed.privacy.ledger.charge import Charge, Client, Row
from dpfed.privacy.ledger.private_files import fsync
from dpfed.privacy.ledger.storage import (
    FORMAT,
    Head,
    beside,
    build_file,
    canonical,
    check_vacant,
    connect,
    file_errors,
    has_log,
    ledger_error,
    nameable,
    owner_of,
    read_head,
    read_meta,
    restrict,
    row_errors,
    row_hash,
    take_lock,
    write_head,
)
from dpfed.privacy.mechanism import Mechanism

Pathlike = str | os.PathLike[str]
History = list[tuple[Mechanism, int]]

_MECHANISM = "sampling, rate, noise_multiplier, batches, releases"


class Ledger:
    """An open privacy ledger, made by `create` or `open`; one thread at a time may use it."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, lock: IO[bytes] | None, meta: str
    ) -> None:
        self.path = path
        self._db = db
        self._lock = lock
        self.meta: dict[str, Any] = json.loads(meta)
        # Hash that the first row stores in place of the hash of the row before.
        self._genesis = hashlib.sha256(meta.encode()).hexdigest()
        # Content of the head file (row count, last hash); None: read it before the next charge.
        self._synced: Head | None = None

    @classmethod
    def create(
        cls, path: Pathlike, *, run: str | None = None, client: str | None = None, **meta: object
    ) -> Self:
        """Create and open the ledger of one `run` (all its clients) or of one real `client`.

        meta  facts that the ledger stores, such as delta; they must be JSON-serialisable
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
        with file_errors(path):
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
        """Open a ledger. Raise DpfedError if its owner is another one, or its head file is newer.

        run, client          name of the owner that the ledger must have; None twice for any owner
        readonly             open for reading only, without the lock of the one writer
        accept_missing_head  open a ledger whose head file is missing

        All checks pass before anything on disk changes. Only rows that are newer than the head file
        are checked, because clients open the ledger for every message. `verify` checks all rows.
        """
        path = Path(path).resolve()
        owner = None if run is client is None else owner_of(run, client)
        with file_errors(path), ExitStack() as on_failure:
            meta = read_meta(path, owner)
            lock = None if readonly else on_failure.enter_context(take_lock(path))
            # Read the head file before the rows. In the other order, another process could write
            # in between, and the head would be newer than the rows.
            head = read_head(path)
            mode = "mode=ro" if has_log(path) else "immutable=1"
            with closing(connect(path, mode)) as unlocked:
                cls(path, unlocked, None, meta)._check_rows(head, not readonly, accept_missing_head)
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
        """Write the charges of a round's clients in one transaction; return the row of each charge.

        Noised values may be released only after this returns. If this raises an error, nothing may
        be released, and rows that are on disk still count. A seeded charge that repeats an existing
        row returns that row.

        run  name of the run; may be None in the ledger of a run
        """
        run = self._run_for(charges, run)
        with file_errors(self.path):
            if self._synced is None:
                self._settle(accept_missing_head=False)
            before = self._synced
            self._synced = None
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
        """Return the name of the run to charge. Raise DpfedError for charges of another owner."""
        kind = self.meta["kind"]
        owner = self.meta["owner"]
        if self._lock is None:
            raise ledger_error(self.path, "it is not open for writing in this process")
        run = owner if run is None and kind == "run" else run
        once = len({(c.client, c.round, c.part) for c in charges}) == len(charges)
        if run is None or not nameable(run) or not once:
            raise ValueError(
                "a cohort names its run, and charges each client's part of a round once"
            )
        charged = {run} if kind == "run" else {c.client for c in charges}
        if charged - {owner}:
            raise ledger_error(self.path, f"it takes charges of {kind} {owner!r} only")
        return run

    def _append(self, charges: Sequence[Charge], run: str) -> list[Row]:
        head = self._last()
        now = time.time()
        txn = 1 + (self._value("SELECT txn FROM charge WHERE seq = ?", head.rows) or 0)
        same = "FROM charge WHERE run = ? AND client = ? AND round = ? AND part = ?"
        rows = []
        for charge in charges:
            key = (run, charge.client, charge.round, charge.part)
            columns = None
            # With seeded noise, a repeated attempt releases the same value: return its old row.
            # Noise of the operating system differs in every attempt and needs a new row.
            if charge.noise == "seeded":
                columns = self._db.execute(f"SELECT * {same} AND noise = 'seeded'", key).fetchone()
            if columns is None:
                attempt = 1 + self._value(f"SELECT COALESCE(MAX(attempt), 0) {same}", *key)
                fields = (txn, *key, attempt, *charge.columns(), now, head.hash)
                content = (head.rows + 1, *fields)
                head = Head(head.rows + 1, row_hash(content))
                columns = (*content, head.hash)
                self._db.execute(f"INSERT INTO charge VALUES ({'?,' * len(content)}?)", columns)
            row = self._row(columns)
            if row.charge != charge:
                raise ledger_error(
                    self.path,
                    f"row {row.seq} charges client {charge.client} in round {charge.round} "
                    "otherwise than now, it was written with another configuration",
                )
            rows.append(row)
        return rows

    def _begin_writing(self, accept_missing_head: bool) -> None:
        if has_log(self.path):
            # A killed process can leave rows in SQLite's log that are not on disk yet. Write them
            # to disk, because a repeated charge returns such a row instead of writing a new one.
            fsync(beside(self.path, "-wal"))
        if self._value("PRAGMA journal_mode = WAL") != "wal":
            raise ledger_error(
                self.path, "the file system does not support SQLite's write-ahead log"
            )
        self._settle(accept_missing_head)
        _writers.add(self)

    def _settle(self, accept_missing_head: bool) -> None:
        """Update the head file if a crash left it one transaction behind the ledger."""
        head = read_head(self.path)
        found = self._check_rows(head, True, accept_missing_head)
        if found != head:
            write_head(self.path, found)
        self._synced = found

    def head(self) -> Head:
        with file_errors(self.path):
            return self._last()

    def check_head(self, head: tuple[int, str]) -> None:
        """Raise DpfedError if this ledger lacks the row that `head` describes.

        head  (number of rows, hash of the last row) of this ledger at an earlier time
        """
        rows, hash_ = head
        with file_errors(self.path):
            last = self._last()
            if last.rows < rows:
                raise ledger_error(
                    self.path,
                    f"row {last.rows + 1} is missing, it has had {rows} rows; "
                    "an old copy forgets what was spent, put back the newest",
                )
            if self._hash_at(rows) != hash_:
                raise ledger_error(self.path, f"row {rows} is not the row that its head remembers")

    def verify(self) -> Head:
        """Check all rows; return their number and the last hash. An error names the wrong row."""
        with file_errors(self.path):
            # Read the head file before the rows, because another process may write between the two.
            remembered = read_head(self.path)
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

    def rows(self) -> Iterator[Row]:
        """Yield all rows, the oldest first."""
        with file_errors(self.path):
            for columns in self._db.execute("SELECT * FROM charge ORDER BY seq"):
                yield self._row(columns)

    def rounds_charged(self, run: str, part: str = "train") -> list[int]:
        """Return the numbers of all rounds of a run with a charge for `part`, even a void one."""
        query = "SELECT DISTINCT round FROM charge WHERE run = ? AND part = ? ORDER BY round"
        return [int(round_) for (round_,) in self._query(query, run, part)]

    def participation(self) -> dict[Client, int]:
        """Return for each client the number of rounds that have one or more charges."""
        rounds = (
            "SELECT client, MIN(seq) AS s FROM charge WHERE void = 0 GROUP BY client, run, round"
        )
        query = f"SELECT client, COUNT(*) FROM ({rounds}) GROUP BY client ORDER BY MIN(s)"
        return dict(self._query(query))

    def history(self, client: Client) -> History:
        """Return each mechanism of this client with its charged steps, including repetitions."""
        return self._histories("AND client = ?", client).get(client, [])

    def histories(self) -> dict[Client, History]:
        """Return the `history` of each client that has a charge, in the order of first charges."""
        return self._histories()

    def _histories(self, where: str = "", *values: object) -> dict[Client, History]:
        query = (
            f"SELECT MIN(seq), client, {_MECHANISM}, SUM(steps) FROM charge WHERE void = 0 {where} "
            f"GROUP BY client, {_MECHANISM} ORDER BY MIN(seq)"
        )
        histories: dict[Client, History] = {}
        for seq, client, *fields, steps in self._query(query, *values):
            with row_errors(self.path, seq):
                histories.setdefault(client, []).append((Mechanism(*fields), steps))
        return histories

    def _query(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with file_errors(self.path):
            return self._db.execute(query, values).fetchall()

    def _value(self, query: str, *values: object) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def _row(self, columns: tuple[Any, ...]) -> Row:
        with row_errors(self.path, columns[0]):
            return Row.of(columns)

    def _last(self) -> Head:
        row = self._db.execute("SELECT seq, hash FROM charge ORDER BY seq DESC LIMIT 1").fetchone()
        return Head(0, self._genesis) if row is None else Head(*row)

    def _hash_at(self, seq: int) -> Any:
        return self._value("SELECT hash FROM charge WHERE seq = ?", seq) if seq else self._genesis

    def _walk(self, after: int) -> Head:
        """Check the hashes of all rows after row `after`; return the last row's number and hash."""
        head = Head(after, self._hash_at(after))
        # True rows start at 1, but forged rows can have smaller numbers: read them too.
        start = after + 1 if after else -(2**63)
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
        """Check the ledger against its head file; return its number of rows and its last hash.

        Raise DpfedError if `head`, the head file, is newer, or more than one transaction older.
        """
        accept = "Ledger.open(..., accept_missing_head=True)"
        if head is None:
            if self._last().rows and not accept_missing_head:
                raise ledger_error(
                    self.path,
                    "its head file is missing, so an old copy could not be told from the newest; "
                    f"put it back, or accept the ledger as it is with {accept}",
                )
            return self._walk(after=0)
        self.check_head(head)
        ahead = self._value("SELECT COUNT(DISTINCT txn) FROM charge WHERE seq > ?", head.rows)
        # A reader does not check this: another process may have written rows in the meantime.
        if writing and ahead > 1:
            raise ledger_error(
                self.path,
                f"its head file is {ahead} transactions behind, which no crash explains; "
                f"if the ledger is the newest, delete that file and use {accept}",
            )
        return self._walk(after=max(head.rows - 1, 0))


_writers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked child shares the locks of open ledgers. It must not keep them after its parent ends.
    for ledger in list(_writers):
        if ledger._lock is not None:
            ledger._lock.close()
            ledger._lock = None


os.register_at_fork(after_in_child=_release_in_child)

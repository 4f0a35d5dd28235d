"""Read and write the files of a privacy ledger: the SQLite file, the head file and the lock file.

The head file stores the number of rows and the hash of the last row.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from dpfed.errors import DpfedError
from dpfed.privacy.ledger.private_files import (
    fsync,
    lock_file,
    open_private,
    replace_file,
    restrict_file,
)

FORMAT = 1
# The letters "dpfd" in SQLite's file header mark the file as a ledger.
_APPLICATION_ID = 0x64706664
_FORBID = "BEGIN SELECT RAISE(ABORT, 'the privacy ledger is append-only'); END"
# `read_meta` accepts a ledger only if its schema has exactly these statements, because an added
# trigger or view could change the result of a query.
_TABLES = (
    "CREATE TABLE meta (json TEXT NOT NULL)",
    "CREATE TABLE charge (seq INTEGER PRIMARY KEY, txn INTEGER, run TEXT, client, round INTEGER, "
    "part TEXT, attempt INTEGER, steps INTEGER, sampling TEXT, rate REAL, noise_multiplier REAL, "
    "batches INTEGER, releases INTEGER, noise TEXT, void INTEGER, time REAL, prev TEXT, hash TEXT)",
    "CREATE UNIQUE INDEX charge_key ON charge (run, client, round, part, attempt)",
    f"CREATE TRIGGER charge_edit BEFORE UPDATE ON charge {_FORBID}",
    f"CREATE TRIGGER charge_drop BEFORE DELETE ON charge {_FORBID}",
)
canonical = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode


class Head(NamedTuple):
    """Number of rows of a ledger, and hash of the last row: a short proof of the whole content."""

    rows: int
    hash: str


def row_hash(fields: Sequence[object]) -> str:
    try:
        return hashlib.sha256(canonical(fields).encode()).hexdigest()
    except (TypeError, ValueError):
        # JSON cannot represent the row, because it has bytes or infinity. No true charge has them,
        # so the row is forged. Return "", which differs from every hash.
        return ""


def nameable(text: object) -> bool:
    """Return True if this can be the name of a run, client or part in the ledger.

    A name is a string of 1 to 200 printable characters.
    """
    return isinstance(text, str) and 0 < len(text) <= 200 and text.isprintable()


def owner_of(run: str | None, client: str | None) -> tuple[str, str]:
    kind, owner = ("client", client) if run is None else ("run", run)
    if owner is None or None not in (run, client):
        raise ValueError("a ledger belongs to a run or to a client")
    if not nameable(owner):
        raise DpfedError(
            f"{owner!r} cannot be the name of a {kind}: use up to 200 printable characters."
        )
    return kind, owner


def ledger_error(path: Path, what: str) -> DpfedError:
    return DpfedError(f"Privacy ledger {path}: {what}.")


@contextmanager
def row_errors(path: Path, seq: int) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ledger_error(path, f"row {seq} is damaged, {error}") from error


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Convert errors of the disk, of SQLite and of damaged files to a one-sentence DpfedError."""
    try:
        yield
    except sqlite3.ProgrammingError:
        # This error is a defect of dpfed, such as the use of a closed ledger. Raise it unchanged,
        # with its traceback.
        raise
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        # SQLite raises UnicodeDecodeError if its message quotes a damaged schema.
        default = "SQLITE_IOERR" if isinstance(error, OSError) else ""
        name = getattr(error, "sqlite_errorname", default)
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            what = "another process is using it, wait for that or stop it"
        elif name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
            what = f"cannot read or write it ({error}), check space and permissions"
        else:
            what = f"damaged, or no ledger at all ({error}); put back the newest copy"
        raise ledger_error(path, what) from error


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def has_log(path: Path) -> bool:
    """Return True if SQLite's write-ahead log of this ledger is not empty.

    After a crash, or while a process writes, the log can hold rows that the SQLite file lacks.
    """
    wal = beside(path, "-wal")
    return wal.exists() and wal.stat().st_size > 0


def restrict(path: Path) -> None:
    """Set mode 0600 for all files of a ledger, so that only their owner can read them."""
    for suffix in ("", ".head", ".lock", "-wal", "-shm", "-journal"):
        restrict_file(beside(path, suffix))


def read_head(path: Path) -> Head | None:
    file = beside(path, ".head")
    try:
        found = json.loads(file.read_bytes()[:4096])
        head = Head(found["rows"], found["hash"])
        if type(head.rows) is not int or not 0 <= head.rows < 2**63 or type(head.hash) is not str:
            raise ValueError("not a head")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ledger_error(
            path, f"its head file {file.name} is damaged, put back the newest copy of it"
        ) from error
    return head


def write_head(path: Path, head: Head) -> None:
    line = canonical(head._asdict()).encode() + b"\n"
    replace_file(beside(path, ".head"), lambda file: file.write(line))


def take_lock(path: Path) -> IO[bytes]:
    try:
        return lock_file(beside(path, ".lock"))
    except BlockingIOError as error:
        raise ledger_error(
            path, "another process is writing to it, wait for that or stop it"
        ) from error


def connect(path: Path, mode: str) -> sqlite3.Connection:
    # Open the file only through SQLite: closing it after `open()` would drop SQLite's locks.
    # check_same_thread is off, because a run writes charges from another thread, one at a time.
    db = sqlite3.connect(
        f"{path.as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = FULL"):
            db.execute(f"PRAGMA {pragma}")
        if mode == "mode=ro":
            db.execute("SELECT COUNT(*) FROM meta")
    except BaseException as error:
        db.close()
        unwritable = mode == "mode=ro" and not os.access(path.parent, os.W_OK)
        if isinstance(error, sqlite3.OperationalError) and unwritable:
            # In a read-only folder, SQLite cannot create its shared-memory file. The mode
            # immutable=1 reads the ledger without this file.
            return connect(path, "immutable=1")
        raise
    return db


def check_vacant(path: Path) -> None:
    if path.exists():
        raise ledger_error(path, "it exists already, open it or choose another place")
    if has_log(path) or (read_head(path) or (0,))[0]:
        raise ledger_error(path, "it is gone, but files beside it remember charges; put it back")


def build_file(path: Path, meta: str) -> None:
    """Create an empty ledger that contains the JSON text `meta`.

    The file gets its name when it is complete, so a crash leaves a whole ledger or none.
    """
    new = beside(path, ".new")
    try:
        new.unlink(missing_ok=True)
        beside(new, "-journal").unlink(missing_ok=True)
        # Create the file with mode 0600 first, because SQLite gives its journals the same mode.
        open_private(new, "wb").close()
        with closing(connect(new, "mode=rw")) as db:
            db.execute("BEGIN")
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            for statement in _TABLES:
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES (?)", (meta,))
            db.execute("COMMIT")
            db.execute("PRAGMA journal_mode = WAL")
        new.rename(path)
        fsync(path.parent)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def read_meta(path: Path, owner: tuple[str, str] | None) -> str:
    """Return the ledger's `meta` as JSON text; refuse a damaged file or a ledger of another owner.

    owner  ("run" or "client", name) that the ledger must belong to; None for any owner
    """
    if not path.exists():
        raise ledger_error(path, "there is no such file")
    # Read SQLite's log too if it is not empty: after a crash it has rows that the file lacks.
    with closing(connect(path, "mode=ro" if has_log(path) else "immutable=1")) as db:
        ((application,),) = db.execute("PRAGMA application_id")
        ((version,),) = db.execute("PRAGMA user_version")
        if application != _APPLICATION_ID:
            raise ledger_error(path, "this is not a privacy ledger")
        if version > FORMAT:
            raise ledger_error(
                path, f"a newer dpfed wrote it (format {version}, not {FORMAT}), update dpfed"
            )
        tables = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")}
        found = db.execute("SELECT json FROM meta").fetchall() if tables == set(_TABLES) else []
    try:
        ((text,),) = found
        meta = json.loads(text)
        belongs = (meta["kind"], meta["owner"])
        if (
            meta["format"] != version
            or meta["kind"] not in ("run", "client")
            or not nameable(meta["owner"])
        ):
            raise ValueError("not a description")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ledger_error(
            path, "damaged, its description cannot be read; put back the newest copy"
        ) from error
    if owner not in (None, belongs):
        raise ledger_error(
            path, f"it belongs to {belongs[0]} {belongs[1]!r}, not to {owner[0]} {owner[1]!r}"
        )
    return str(text)

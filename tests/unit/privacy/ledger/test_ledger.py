"""The ledger never forgets: each promise of privacy/ledger.py with a way to break it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpfed.errors import DpfedError
from dpfed.privacy.ledger import ledger as module
from dpfed.privacy.ledger import storage as files
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.ledger.storage import Head
from dpfed.privacy.mechanism import Mechanism

A = Mechanism("poisson", 0.016, 1.0)
B = Mechanism("fixed_wor", 0.1, 0.7, batches=2, releases=2)
MEMORY = (
    "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)  # thousands of synced writes are slow on a disk
SRC = str(Path(module.__file__).parents[3])


def cohort(round_: int, clients: int = 5, noise: str = "seeded", steps: int = 20) -> list[Charge]:
    return [Charge(i, round_, steps, A, noise) for i in range(clients)]  # type: ignore[arg-type]


def begun(path: Path, rounds: int) -> Path:
    with Ledger.create(path, run="r", delta=1e-5) as ledger:
        for t in range(rounds):
            ledger.charge(cohort(t))
    return path


@functools.cache
def template(rounds: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        begun(Path(folder) / "l", rounds)
        return {f.name[1:]: f.read_bytes() for f in Path(folder).iterdir()}


def filled(path: Path, rounds: int = 4) -> Path:
    """A closed ledger with five clients per round, copied because creating one is slow."""
    for suffix, content in template(rounds).items():
        path.with_name(path.name + suffix).write_bytes(content)
    return path


def image(path: Path, to: Path) -> Path:
    """Copy all files while the writer is active, as a crash at this moment would leave them."""
    to.mkdir()
    for file in path.parent.iterdir():
        shutil.copy(file, to / file.name)
    return to / path.name


def tamper(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        triggers = db.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            db.execute(statement)
        for _, sql in triggers:
            db.execute(sql)
        db.commit()


def on_disk(folder: Path) -> dict[str, str]:
    """Every byte but SQLite's shared memory, which holds no data and is rebuilt at each opening."""
    files = (f for f in folder.iterdir() if not f.name.endswith("-shm"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@contextlib.contextmanager
def refused(path: Path, match: str):
    """One sentence of our own, and the folder is as it was."""
    before = on_disk(path.parent)
    with pytest.raises(DpfedError, match=match) as caught:
        yield
    assert on_disk(path.parent) == before
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def python(script: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys, os, signal\n" + script, *map(str, args)]
    env = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def output(script: str, *args: object) -> str:
    child = python(script, *args)
    out, err = child.communicate(timeout=60)
    assert child.returncode in (0, -signal.SIGKILL), err
    return out.strip()


# --- what is written ---


def test_charges_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.create(path, run="r", delta=1e-5, plan="abc") as ledger:
        assert (ledger.meta["delta"], ledger.meta["plan"], ledger.meta["owner"]) == (
            1e-5,
            "abc",
            "r",
        )
        made = ledger.charge([Charge(7, 0, 20, A, "seeded"), Charge("seven", 0, 20, B, "seeded")])
        made += ledger.charge(
            [Charge(7, 1, 5, A, "seeded"), Charge(7, 1, 1, B, "seeded", part="evaluate")]
        )
        made += ledger.charge([Charge(7, 2, 9, A, "seeded", void=True)])
        assert ledger.history(7) == [(A, 25), (B, 1)]
        assert ledger.histories() == {7: [(A, 25), (B, 1)], "seven": [(B, 20)]}
        assert ledger.history("7") == ledger.history("nobody") == []
        assert ledger.participation() == {7: 2, "seven": 1}
    with Ledger.open(path, run="r", readonly=True) as ledger:
        assert list(ledger.rows()) == made
        assert [r.seq for r in made] == [1, 2, 3, 4, 5]
        assert [r.txn for r in made] == [1, 1, 2, 2, 3]
        assert abs(made[0].time - time.time()) < 60
        assert ledger.verify() == ledger.head() == (5, made[-1].hash)
        with pytest.raises(DpfedError, match="not open for writing"):
            ledger.charge(cohort(9))


def test_the_hash_is_what_the_documentation_says(tmp_path: Path) -> None:
    """A third party can check a ledger with sqlite3 and sha256 alone."""
    path = filled(tmp_path / "ledger.db", rounds=2)
    with contextlib.closing(sqlite3.connect(path)) as db:
        (meta,) = db.execute("SELECT json FROM meta").fetchone()
        prev = hashlib.sha256(meta.encode()).hexdigest()
        for *fields, hash_ in db.execute("SELECT * FROM charge ORDER BY seq"):
            assert fields[-1] == prev
            prev = hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()
            assert hash_ == prev
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert json.loads((tmp_path / "ledger.db.head").read_text()) == {"rows": 10, "hash": prev}


def test_commits_are_synced(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l", run="r") as ledger:
        assert ledger._value("PRAGMA synchronous") == 2
        assert ledger._value("PRAGMA journal_mode") == "wal"


@pytest.mark.parametrize("sigma", [0, -0.0, 1, 0.1, 1e-300])
def test_numbers_survive_the_round_trip(tmp_path: Path, sigma: float) -> None:
    mechanism = Mechanism("poisson", 1, sigma)
    with Ledger.create(tmp_path / "l", run="r") as ledger:
        ledger.charge([Charge(-(2**63), 0, 2**62, mechanism, "seeded")])
        assert ledger.verify().rows == 1
        assert ledger.histories() == {-(2**63): [(mechanism, 2**62)]}
        ledger.charge([Charge(-(2**63), 0, 2**62, mechanism, "seeded")])
        assert ledger.head().rows == 1


def test_seeded_replay_reuses_the_row(tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.db")
    with Ledger.open(path, run="r") as ledger:
        head = ledger.head()
        again = ledger.charge(cohort(2))
        assert (ledger.head(), [r.seq for r in again]) == (head, [11, 12, 13, 14, 15])
        mixed = ledger.charge([Charge(0, 3, 20, A, "seeded"), Charge(0, 4, 20, A, "seeded")])
        assert [r.seq for r in mixed] == [16, 21]
        assert ledger.verify().rows == 21
        assert ledger.history(0) == [(A, 100)]


@pytest.mark.parametrize(
    "changed",
    [
        Charge(0, 2, 19, A, "seeded"),
        Charge(0, 2, 20, B, "seeded"),
        Charge(0, 2, 20, Mechanism("poisson", 0.016, 1.0 + 1e-15), "seeded"),
        Charge(0, 2, 20, A, "seeded", void=True),
    ],
)
def test_a_replay_that_differs_is_refused_whole(tmp_path: Path, changed: Charge) -> None:
    path = filled(tmp_path / "ledger.db")
    with Ledger.open(path) as ledger:
        head = ledger.head()
        with pytest.raises(DpfedError, match="row 11 charges client 0 in round 2 otherwise"):
            ledger.charge([Charge(9, 9, 1, A, "seeded"), changed])
        assert ledger.head() == head
        ledger.charge(cohort(9))
        assert ledger.verify().rows == head.rows + 5


def test_every_attempt_with_os_noise_is_charged(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l", run="r") as ledger:
        attempts = [ledger.charge(cohort(0, 2, "os"))[0].attempt for _ in range(3)]
        attempts += [ledger.charge(cohort(0, 1, "seeded"))[0].attempt for _ in range(2)]
        attempts += [ledger.charge(cohort(0, 1, "os"))[0].attempt]
        assert attempts == [1, 2, 3, 4, 4, 5]
        assert ledger.histories() == {0: [(A, 100)], 1: [(A, 60)]}
        assert ledger.participation() == {0: 1, 1: 1}
        assert ledger.verify().rows == 8


def test_a_clients_ledger_spans_runs(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger.create(path, client="clinic") as ledger:
        for run in ("spring", "autumn"):
            ledger.charge([Charge("clinic", 0, 20, A, "os")], run=run)
        assert ledger.history("clinic") == [(A, 40)]
        assert ledger.participation() == {"clinic": 2}
        with pytest.raises(DpfedError, match="client 'clinic' only"):
            ledger.charge([Charge("other", 0, 20, A, "os")], run="spring")
        with pytest.raises(ValueError, match="names its run"):
            ledger.charge([Charge("clinic", 0, 20, A, "os")])
    with refused(path, "belongs to client 'clinic', not to run 'spring'"):
        Ledger.open(path, run="spring")


@pytest.mark.parametrize(
    "bad",
    [
        {"client": True},
        {"client": 1.0},
        {"client": ""},
        {"client": "a\nb"},
        {"client": "\ud800"},
        {"client": 2**63},
        {"round": -1},
        {"round": 1.0},
        {"steps": 0},
        {"steps": 2**63},
        {"part": ""},
        {"noise": "none"},
        {"void": True, "noise": "os"},
    ],
)
def test_bad_charges_are_not_made(bad: dict[str, object]) -> None:
    good: dict[str, object] = {
        "client": 1,
        "round": 0,
        "steps": 1,
        "mechanism": A,
        "noise": "seeded",
    }
    Charge(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cannot name|rounds count|noise is"):
        Charge(**(good | bad))  # type: ignore[arg-type]


def test_one_cohort_names_a_client_once(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l", run="r") as ledger:
        with pytest.raises(ValueError, match="once"):
            ledger.charge([*cohort(0), Charge(0, 0, 1, A, "seeded")])
        assert ledger.charge([]) == []
        assert ledger.head().rows == 0


# --- tampering ---

SWAP = (
    "UPDATE charge SET seq = -7 WHERE seq = 7",
    "UPDATE charge SET seq = 7 WHERE seq = 8",
    "UPDATE charge SET seq = 8 WHERE seq = -7",
)


@pytest.mark.parametrize(
    ("row", "statements"),
    [
        *(
            (7, [f"UPDATE charge SET {c} WHERE seq = 7"])
            for c in (
                "steps = 1",
                "client = 99",
                "client = '1'",
                "round = 8",
                "rate = 0.01",
                "noise_multiplier = 9.0",
                "void = 1",
                "releases = 2",
                "batches = 2",
                "noise = 'os'",
                "time = 0.0",
                "attempt = 2",
                "run = 'q'",
                "part = 'x'",
                "sampling = 'fixed_wor'",
                "steps = NULL",
                "steps = x'00'",
                "rate = 9e999",
                "txn = 9",
                "hash = 'x'",
            )
        ),
        (7, ["DELETE FROM charge WHERE seq = 7"]),
        (1, ["DELETE FROM charge WHERE seq = 1"]),
        (-3, ["UPDATE charge SET seq = -3 WHERE seq = 7"]),
        (7, SWAP),
        (7, ["DELETE FROM charge WHERE seq = 7", "UPDATE charge SET seq = 7 WHERE seq = 12"]),
        (1, ["UPDATE meta SET json = replace(json, '1e-05', '1e-03')"]),
    ],
)
def test_verify_names_the_row(tmp_path: Path, row: int, statements: list[str]) -> None:
    path = filled(tmp_path / "ledger.db")
    with Ledger.open(path) as ledger:
        assert ledger.verify().rows == 20
    tamper(path, *statements)
    with (
        pytest.raises(DpfedError, match=rf"row {row} "),
        Ledger.open(path, readonly=True) as ledger,
    ):
        ledger.verify()


def test_a_row_rewritten_with_its_own_hash_breaks_the_chain(tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.db")
    with contextlib.closing(sqlite3.connect(path)) as db:
        *fields, _ = db.execute("SELECT * FROM charge WHERE seq = 7").fetchone()
    fields[7] = 1
    tamper(path, f"UPDATE charge SET steps = 1, hash = '{files.row_hash(fields)}' WHERE seq = 7")
    with Ledger.open(path) as ledger, pytest.raises(DpfedError, match="row 8 does not follow"):
        ledger.verify()


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_rows_cut_off_at_the_end_are_missed(tmp_path: Path, rows: int) -> None:
    path = filled(tmp_path / "ledger.db")
    tamper(path, f"DELETE FROM charge WHERE seq > {20 - rows}")
    for readonly in (True, False):
        with refused(path, f"row {21 - rows} is missing, it has had 20 rows"):
            Ledger.open(path, readonly=readonly)


def test_rows_cut_off_while_it_is_open_are_missed(tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.db")
    with Ledger.open(path) as ledger:
        tamper(path, "DELETE FROM charge WHERE seq = 20")
        with pytest.raises(DpfedError, match="row 20 is missing"):
            ledger.verify()
        with pytest.raises(DpfedError, match="something else has written"):
            ledger.charge(cohort(9))
        with pytest.raises(DpfedError, match="row 20 is missing"):
            ledger.charge(cohort(9))


def test_the_file_itself_forbids_edits_and_foreign_triggers(tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.db")
    with contextlib.closing(sqlite3.connect(path)) as db:
        for statement in ("UPDATE charge SET steps = 1", "DELETE FROM charge"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)
    tamper(
        path, "CREATE TRIGGER forget AFTER INSERT ON charge BEGIN UPDATE meta SET json = ''; END"
    )
    with refused(path, "description cannot be read"):
        Ledger.open(path)


def test_a_damaged_index_is_noticed(tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.db")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        meta = "SELECT rootpage FROM sqlite_master WHERE name = 'meta'"
        db.execute(f"UPDATE sqlite_master SET rootpage = ({meta}) WHERE name = 'charge_key'")
        db.commit()
    with Ledger.open(path, readonly=True) as ledger, pytest.raises(DpfedError, match="damaged"):
        ledger.verify()


# --- head file ---


@pytest.mark.parametrize("pending", [True, False], ids=["crash image", "closed"])
def test_an_old_copy_is_refused(tmp_path: Path, pending: bool) -> None:
    (tmp_path / "now").mkdir()
    path = filled(tmp_path / "now" / "ledger.db")
    with Ledger.open(path) as ledger:
        ledger.charge(cohort(10))
        old = image(path, tmp_path / "old")
        head = ledger.head()
        ledger.charge(cohort(11))
        newest = (tmp_path / "now" / "ledger.db.head").read_bytes()
    if not pending:
        Ledger.open(old).close()
    assert (tmp_path / "old" / "ledger.db-wal").exists() == pending
    (tmp_path / "old" / "ledger.db.head").write_bytes(newest)
    for readonly in (False, True):
        with refused(old, "row 26 is missing, it has had 30 rows; an old copy forgets"):
            Ledger.open(old, readonly=readonly)
    with Ledger.open(path) as ledger:
        ledger.check_head(head)  # an earlier head is continued, a later or foreign one is not
        ledger.check_head((0, ledger._genesis))
        for rows, hash_, match in (
            (31, head.hash, "row 31 is missing"),
            (24, head.hash, "row 24 is not"),
        ):
            with pytest.raises(DpfedError, match=match):
                ledger.check_head((rows, hash_))


def test_another_ledger_of_the_same_run_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        begun(tmp_path / name / "l", 4)
    shutil.copy(tmp_path / "a" / "l.head", tmp_path / "b" / "l.head")
    with refused(tmp_path / "b" / "l", "row 20 is not the row that its head remembers"):
        Ledger.open(tmp_path / "b" / "l")


def test_a_crash_between_commit_and_head_is_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    path = filled(tmp_path / "a" / "l")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    ledger = Ledger.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_head", full)
        with pytest.raises(DpfedError, match="No space left"):
            ledger.charge(cohort(10, noise="os"))
        with pytest.raises(DpfedError, match="No space left"):  # not a second one on top of it
            ledger.charge(cohort(11, noise="os"))
        crashed = image(path, tmp_path / "b")
    assert files.read_head(crashed) == (20, ledger._hash_at(20))
    with Ledger.open(crashed, readonly=True) as reader:
        assert reader.verify().rows == 25
    assert files.read_head(crashed).rows == 20  # type: ignore[union-attr]
    with Ledger.open(crashed) as healed:
        assert healed.verify() == files.read_head(crashed) == ledger.head()
        assert healed.charge(cohort(10, noise="os"))[0].attempt == 2
    ledger.charge(cohort(12))  # the one that lived through it goes on, too
    assert ledger.verify() == files.read_head(path) == (30, ledger.head().hash)
    ledger.close()


def test_rows_of_a_killed_process_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be in memory only. A repeated charge relies on them, and then the power may fail."""
    (tmp_path / "a").mkdir()
    with Ledger.open(filled(tmp_path / "a" / "l")) as ledger:
        ledger.charge(cohort(10))
        crashed = image(ledger.path, tmp_path / "b")
    synced: list[Path] = []
    monkeypatch.setattr(module, "fsync", synced.append)
    with Ledger.open(crashed) as ledger:
        assert crashed.with_name("l-wal") in synced
        assert ledger.charge(cohort(10))[0].seq == 21


def test_rows_after_the_head_are_checked(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    with Ledger.open(path) as ledger:
        files.write_head(path, Head(15, ledger._hash_at(15)))
    shutil.copytree(tmp_path, tmp_path / "copy")
    Ledger.open(path).close()
    tamper(tmp_path / "copy" / "l", "UPDATE charge SET steps = 1 WHERE seq = 18")
    with refused(tmp_path / "copy" / "l", "row 18 was edited"):
        Ledger.open(tmp_path / "copy" / "l")


def test_a_head_further_behind_than_a_crash_explains(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    with Ledger.open(path) as ledger:
        files.write_head(path, Head(10, ledger._hash_at(10)))
    with refused(path, "2 transactions behind, which no crash explains"):
        Ledger.open(path)
    with Ledger.open(path, readonly=True) as ledger:
        ledger.verify()


def test_a_missing_head_must_be_accepted(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    (tmp_path / "l.head").unlink()
    for readonly in (True, False):
        with refused(path, r"head file is missing.*accept_missing_head=True"):
            Ledger.open(path, readonly=readonly)
    with Ledger.open(path, accept_missing_head=True) as ledger:
        assert files.read_head(path) == ledger.head()
    (tmp_path / "l.head").unlink()
    tamper(path, "UPDATE charge SET steps = 1 WHERE seq = 3")
    with refused(path, "row 3 was edited"):
        Ledger.open(path, accept_missing_head=True)


def test_an_empty_ledger_gets_its_head(tmp_path: Path) -> None:
    """Killed between the two files of a new ledger: nothing is spent, so nothing is forgotten."""
    Ledger.create(tmp_path / "l", run="r").close()
    (tmp_path / "l.head").unlink()
    with Ledger.open(tmp_path / "l") as ledger:
        assert files.read_head(ledger.path) == ledger.head() == (0, ledger._genesis)


def test_a_deleted_ledger_is_not_begun_anew(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    with refused(path, "exists already"):
        Ledger.create(path, run="r")
    path.unlink()
    with refused(path, "files beside it remember charges"):
        Ledger.create(path, run="r")
    with refused(path, "no such file"):
        Ledger.open(path)


# --- whose, which version, what kind of file ---


def test_another_runs_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = filled(tmp_path / "a" / "l")
    with refused(path, "belongs to run 'r', not to run 'other'"):
        Ledger.open(path, run="other")
    with Ledger.open(path) as ledger:
        with pytest.raises(DpfedError, match="run 'r' only"):
            ledger.charge(cohort(9), run="other")
        ledger.charge(cohort(9), run="r")
        crashed = image(path, tmp_path / "b")
    with refused(crashed, "belongs to run 'r', not to client 'other'"):
        Ledger.open(crashed, client="other")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    tamper(path, f"PRAGMA user_version = {files.FORMAT + 1}")
    for readonly in (True, False):
        with refused(path, r"newer dpfed wrote it \(format 2"):
            Ledger.open(path, readonly=readonly)


@pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0", b"\0" * 5000, b"{}" * 3000])
def test_what_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "l").write_bytes(content)
    for readonly in (True, False):
        with refused(tmp_path / "l", "not a privacy ledger|no ledger at all"):
            Ledger.open(tmp_path / "l", readonly=readonly)


def test_other_databases_and_folders_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "l")) as db:
        db.execute("CREATE TABLE t (a)")
    with refused(tmp_path / "l", "not a privacy ledger"):
        Ledger.open(tmp_path / "l")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DpfedError, match="cannot read or write"):
        Ledger.open(tmp_path / "folder")
    with pytest.raises(DpfedError, match="cannot read or write"):
        Ledger.create(tmp_path / "no" / "l", run="r")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b"null",
        b'{"rows":-1,"hash":""}',
        b'{"rows":true,"hash":"x"}',
        b"[" * 4000,
        b'{"rows":1e3,"hash":"x"}',
        b'{"rows":1,"hash":2}',
        b"\xff",
        b'{"rows":%s,"hash":"x"}' % (b"9" * 99),
    ],
)
def test_a_damaged_head_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = filled(tmp_path / "l")
    (tmp_path / "l.head").write_bytes(content)
    with refused(path, "head file l.head is damaged"):
        Ledger.open(path)


# --- processes, disks ---

OPEN = """
from dpfed.errors import DpfedError
from dpfed.privacy.ledger import private_files
from dpfed.privacy.ledger import ledger as module, storage as files
from dpfed.privacy.ledger.ledger import *
m = Mechanism('poisson', .1, 1.)
"""
LOOP = """
with Ledger.open(sys.argv[1], run="r") as ledger:
    for t in range(int(sys.argv[2]), 10**6):
        ledger.charge([Charge(c, t, 1, m, sys.argv[3]) for c in range(20)])
        print(t, flush=True)
"""


def test_one_writer_many_readers(tmp_path: Path) -> None:
    path = filled(tmp_path / "l", rounds=0)
    child = python(OPEN + LOOP, path, 0, "os")
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        for _ in range(5):
            with pytest.raises(DpfedError, match="another process is writing"):
                Ledger.open(path, run="r")
        seen = 0
        for _ in range(30):  # while it goes on writing
            with Ledger.open(path, run="r", readonly=True) as reader:
                assert reader.verify().rows >= seen
                seen = reader.head().rows
                assert seen % 20 == 0
        assert seen > 20
    finally:
        child.kill()
        child.communicate()
    Ledger.open(path, run="r").close()
    with Ledger.open(path) as first:
        with refused(path, "another process is writing"):
            Ledger.open(path)
        with pytest.raises(DpfedError, match="exists already"):
            Ledger.create(path, run="r")
        with Ledger.open(
            path, readonly=True
        ) as reader:  # in the same process, and closed before the writer
            first.charge(cohort(10**7))
            assert reader.head() == first.head()
        assert first.charge(cohort(10**7 + 1))


@pytest.mark.parametrize("noise", ["seeded", "os"])
def test_kill_9(tmp_path: Path, noise: str) -> None:
    """Every charge that the child reported is there, and nothing is charged twice."""
    path = filled(tmp_path / "l", rounds=0)
    rng, said, kills, stop = random.Random(noise), -1, 0, time.monotonic() + 4
    while kills < 15 and (time.monotonic() < stop or kills < 3):
        # Seeded, the resumed run repeats the last three rounds; with fresh noise that costs again.
        child = python(OPEN + LOOP, path, max(said - 2, 0), noise)
        assert child.stdout is not None
        out = child.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        child.kill()
        out += child.stdout.read()
        assert child.communicate()[1] == ""
        assert child.returncode == -signal.SIGKILL
        kills += 1
        said = max([said, *map(int, out.split())])
        with Ledger.open(path, run="r", readonly=True) as ledger:
            ledger.verify()
            rounds = {r.charge.round for r in ledger.rows()}
            assert set(range(said + 1)) <= rounds <= set(range(said + 2))
            assert set(ledger.participation().values()) == {len(rounds)}
            steps = ledger.history(0)[0][1]
            assert steps == len(rounds) if noise == "seeded" else steps >= len(rounds)
    with Ledger.open(path, run="r") as ledger:
        assert ledger.verify().rows % 20 == 0


@pytest.mark.parametrize(
    "moment", ["module.write_head", "os.fsync", "os.replace", "private_files.fsync"]
)
def test_kill_9_at_each_step_of_a_charge(tmp_path: Path, moment: str) -> None:
    """After the commit, before the sync of the new head, before the rename, and after it."""
    path = filled(tmp_path / "l", rounds=1)
    patch = f"{moment} = lambda *a: os.kill(os.getpid(), 9)\n"
    out = output(
        OPEN
        + "ledger = Ledger.open(sys.argv[1])\n"
        + patch
        + "ledger.charge([Charge(0, 1, 1, m, 'seeded')]); print('released')",
        path,
    )
    assert out == ""
    head = files.read_head(path)
    assert head is not None
    assert head.rows == (6 if moment == "private_files.fsync" else 5)
    with Ledger.open(path) as ledger:
        assert ledger.verify().rows == 6
        assert files.read_head(path) == ledger.head()
        assert (
            ledger.charge([Charge(0, 1, 1, Mechanism("poisson", 0.1, 1.0), "seeded")])[0].seq == 6
        )


@pytest.mark.parametrize("call", range(4))
def test_kill_9_while_a_ledger_is_created(tmp_path: Path, call: int) -> None:
    """A crash at any sync or rename leaves a whole ledger or none, and the next attempt works."""
    path = tmp_path / "l"
    script = """
left = [int(sys.argv[2])]
def tick(real):
    def wrapped(*a):
        if left[0] == 0: os.kill(os.getpid(), 9)
        left[0] -= 1
        return real(*a)
    return wrapped
module.Path.rename, os.replace = tick(module.Path.rename), tick(os.replace)
os.fsync = tick(os.fsync)
Ledger.create(sys.argv[1], run="r")
"""
    child = python(OPEN + script, path, call)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    with Ledger.open(path, run="r") if path.exists() else Ledger.create(path, run="r") as ledger:
        ledger.charge(cohort(0))
        assert ledger.verify() == files.read_head(path)
    assert {f.name for f in tmp_path.iterdir()} <= {"l", "l.head", "l.lock", ".l.head.part"}


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    script = """
ledger = Ledger.open(sys.argv[1])
pid = os.fork()
if pid == 0:
    try: ledger.charge([Charge(0, 99, 1, m, "os")])
    except DpfedError: os.write(1, b"refused ")
    os.close(1); os.close(2)
    import time; time.sleep(60)
import time; time.sleep(0.2)
os.write(1, str(pid).encode())
os.kill(os.getpid(), 9)
"""
    said, pid = output(OPEN + script, path).split()
    try:
        assert said == "refused"
        os.kill(int(pid), 0)  # it is still there
        with Ledger.open(path) as ledger:
            assert ledger.verify().rows == 20
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_a_full_disk_leaves_no_partial_row(tmp_path: Path) -> None:
    path = filled(tmp_path / "l")
    script = """
import resource
ledger = Ledger.open(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
try: ledger.charge([Charge(c, 9, 1, m, "os") for c in range(9000)]); print("released")
except DpfedError as error: print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(ledger.verify().rows)
ledger.charge([Charge(c, 9, 1, m, "os") for c in range(9000)])
print(ledger.verify().rows)
"""
    sentence, rows, after = output(OPEN + script, path).splitlines()
    assert "cannot read or write it" in sentence
    assert str(path) in sentence
    assert (rows, after) == ("20", "9020")


def test_a_full_disk_while_a_ledger_is_created(tmp_path: Path) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try: Ledger.create(sys.argv[1], run="r")
except DpfedError as error: print(error)
"""
    assert "cannot read or write it" in output(OPEN + script, tmp_path / "l")
    assert {f.name for f in tmp_path.iterdir()} == {"l.lock"}
    Ledger.create(tmp_path / "l", run="r").close()


def test_a_read_only_folder_can_be_read_only() -> None:
    """A child without root's rights: it may report on the ledger, but not write or create one."""
    script = """
import tempfile  # Python's own library may be closed to others: load what is needed first
with tempfile.TemporaryDirectory() as first: Ledger.create(first + "/l", run="r").close()
if os.getuid() == 0: os.setuid(65534)
path = sys.argv[1]
for attempt in (lambda: Ledger.open(path), lambda: Ledger.create(path + "2", run="r")):
    try: attempt(); print("written")
    except DpfedError as error: print(error)
with Ledger.open(sys.argv[1], readonly=True) as ledger: print(ledger.verify().rows)
"""
    with tempfile.TemporaryDirectory(
        prefix="dpfed-ledger-"
    ) as name:  # pytest's own folder is closed to others
        path = filled(Path(name) / "l")
        for file in path.parent.iterdir():
            file.chmod(0o644)
        before = on_disk(path.parent)
        os.chmod(name, 0o555)
        try:
            *sentences, rows = output(OPEN + script, path).splitlines()
        finally:
            os.chmod(name, 0o755)
        assert len(sentences) == 2
        assert all("cannot read or write it" in s and "ermission denied" in s for s in sentences)
        assert (rows, on_disk(path.parent)) == ("20", before)


def test_use_after_close_is_a_mistake_of_the_program(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l", run="r")
    ledger.close()
    with pytest.raises(sqlite3.ProgrammingError):
        ledger.head()


def test_the_work_of_a_charge_does_not_grow_with_what_is_there(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l", run="r") as ledger:
        said: list[str] = []
        ledger._db.set_trace_callback(said.append)
        counts = []
        for t in range(20):
            said.clear()
            ledger.charge(cohort(t, 50))
            counts.append(len(said))
        assert counts[0] >= 50
        assert max(counts[1:]) <= counts[0] + 2


# --- foreign bytes ---


@functools.cache
def images() -> list[dict[str, bytes]]:
    """A closed ledger, and one after a crash, with rows only in the write-ahead log."""
    with tempfile.TemporaryDirectory() as name:
        path, folder = filled(Path(name) / "l", rounds=6), Path(name)
        found = [{f.name: f.read_bytes() for f in folder.iterdir()}]
        with Ledger.open(path) as ledger:
            ledger.charge(cohort(6))
            found.append(
                {f.name: f.read_bytes() for f in folder.iterdir() if not f.name.endswith("-shm")}
            )
    assert set(found[1]) - set(found[0]) == {"l-wal"}
    return found


def try_everything(files: dict[str, bytes], original: dict[str, bytes]) -> None:
    """Only our own error comes out, and what verify lets pass is the true content."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        true, folder = Path(name) / "true", Path(name) / "tried"
        for place, content in ((true, original), (folder, files)):
            place.mkdir()
            for file, data in content.items():
                (place / file).write_bytes(data)
        with Ledger.open(true / "l", readonly=True) as ledger:
            expected = list(ledger.rows())
        for readonly in (True, False):
            with (
                contextlib.suppress(DpfedError),
                Ledger.open(folder / "l", run="r", readonly=readonly) as ledger,
            ):
                with contextlib.suppress(DpfedError):
                    ledger.verify()
                    assert list(ledger.rows()) == expected
                for read in (
                    ledger.histories,
                    ledger.participation,
                    lambda: list(ledger.rows()),
                ):
                    with contextlib.suppress(DpfedError):
                        read()
                if not readonly:
                    ledger.charge(cohort(99))
                    ledger.charge(cohort(99, noise="os"))


def test_every_byte_of_the_first_page(tmp_path: Path) -> None:
    """Every byte of header and schema; SQLite quotes them in errors, and they may not be UTF-8."""
    path = filled(tmp_path / "l")
    with Ledger.open(path, readonly=True) as ledger:
        expected = list(ledger.rows())
    content = path.read_bytes()
    refusals = 0
    for where in (i for i in range(4096) if content[i] or i < 120):
        path.write_bytes(content[:where] + bytes([content[where] ^ 0x80]) + content[where + 1 :])
        try:
            with Ledger.open(path, run="r", readonly=True) as ledger:
                ledger.verify()
                assert list(ledger.rows()) == expected
        except DpfedError:
            refusals += 1
    assert refusals > 700


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(data=st.data())
def test_flipped_bytes(data: st.DataObject) -> None:
    original = images()[data.draw(st.integers(0, 1))]
    name = data.draw(st.sampled_from(sorted(set(original) - {"l.lock"})))
    changed = bytearray(original[name])
    # The first page (header, schema, description) and the ends of pages are tried more often.
    place = st.one_of(st.integers(0, len(changed) - 1), st.integers(0, min(len(changed), 120) - 1))
    for where in data.draw(st.lists(place, min_size=1, max_size=6)):
        changed[where] ^= data.draw(st.integers(1, 255))
    try_everything({**original, name: bytes(changed)}, original)


@FUZZ
@given(data=st.data())
def test_truncated_or_foreign_files(data: st.DataObject) -> None:
    original = images()[data.draw(st.integers(0, 1))]
    name = data.draw(st.sampled_from(sorted(set(original) - {"l.lock"})))
    content = original[name]
    cut = st.integers(0, len(content) - 1).map(lambda n: content[:n])
    pages = st.tuples(*[st.integers(0, max(len(content) // 4096 - 1, 0))] * 2).map(
        lambda p: (
            content[: p[0] * 4096]
            + content[p[1] * 4096 : (p[1] + 1) * 4096]
            + content[(p[0] + 1) * 4096 :]
        )
    )
    changed = data.draw(
        st.one_of(
            cut, pages, st.binary(max_size=200), st.binary(max_size=99).map(content[:100].__add__)
        )
    )
    if changed != content:
        try_everything({**original, name: changed}, original)


def test_the_rounds_of_a_run_count_what_is_void_and_no_other_run(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.db", client="a") as ledger:
        assert ledger.rounds_charged("one") == []
        ledger.charge([Charge("a", 4, 1, A, "os")], run="one")
        ledger.charge([Charge("a", 2, 1, A, "os")], run="one")
        ledger.charge([Charge("a", 9, 1, A, "seeded", void=True)], run="two")
        assert ledger.rounds_charged("one") == [2, 4]
        assert ledger.rounds_charged("two") == [9]

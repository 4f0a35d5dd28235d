"""Full disks, read-only folders and two runs in one folder lose nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from callback_case import Watcher
from command import dpfed
from safetensors.torch import load_file
from torch import equal

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.registry import DEFAULT, registry
from dpfed.training.rounds import Round
from dpfed.training.run import run
from dpfed.training.run_folder.files import read_result

KEYS = (
    "model.name=linear run.rounds=3 run.local_steps=1 run.participation=0.3 "
    "privacy.batch=16 privacy.sigma=2"
)
CONFIG = load(DEFAULT, KEYS.split(), registry())
PLAIN = load(DEFAULT, [*KEYS.split(), "privacy.enabled=false"], registry())


class CrashError(Exception):
    """A simulated power cut."""


def crash(t: int) -> Any:
    def observe(round: Round) -> None:
        if round.t == t:
            raise CrashError

    return observe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "r"
    run(CONFIG, out)
    return out


def same(one: Path, two: Path) -> None:
    a, b = (load_file(out / "model.safetensors") for out in (one, two))
    assert all(equal(a[name], b[name]) for name in a)
    lines = [
        [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (one, two)
    ]
    assert [{**row, "seconds": 0} for row in lines[0]] == [
        {**row, "seconds": 0} for row in lines[1]
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


# --- a full disk ---


@contextmanager
def full_from(nth: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Make the disk full from the n-th sync on; later files are incomplete."""
    count = [0]
    fsync = os.fsync

    def failing(handle: int) -> None:
        count[0] += 1
        if count[0] >= nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        yield count


def test_a_run_resumes_after_a_full_disk_at_any_sync(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_from(10**9, monkeypatch) as count:
        run(CONFIG, tmp_path / "count")
    assert count[0] > 20
    for nth in range(1, count[0] + 1, 3):
        out = tmp_path / str(nth)
        with (
            full_from(nth, monkeypatch),
            pytest.raises(DpfedError, match="No space left") as caught,
        ):
            run(CONFIG, out)
        assert "\n" not in str(caught.value)
        # The last sync comes after the result is complete.
        if read_result(out).get("state") != "finished":
            run(CONFIG, out, mode="resume" if (out / "config.toml").exists() else "new")
        same(whole, out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 200 kB, if this user may."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_run_resumes_after_a_real_full_disk(
    small_disk: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each repetition has less free space, so that each kind of file fails first once."""
    sets = [word for key in KEYS.split() for word in ("--set", key)]
    failed = 0
    for free in (0, 8, 20, 40, 56, 72, 90, 110):
        out = small_disk / f"r{free}"
        filler = small_disk / "filler"
        filler.write_bytes(bytes((200 - free) << 10))
        code = dpfed("run", *sets, "--out", str(out))
        err = capsys.readouterr().err
        assert code in (0, 2), err
        assert "Traceback" not in err
        filler.unlink()
        if code == 2:
            failed += 1
            assert err.strip().splitlines()[-1].startswith("dpfed: ")
            again = (
                ["--resume", str(out)]
                if (out / "config.toml").exists()
                else [*sets, "--out", str(out)]
            )
            assert dpfed("run", *again) == 0, capsys.readouterr().err
        same(whole, out)
        capsys.readouterr()
        subprocess.run(["rm", "-r", str(out)], check=True)
    assert failed >= 4


def test_an_error_of_closing_metrics_does_not_hide_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing such a file fails too, but the first error is reported."""
    full = Path("/dev/full")
    monkeypatch.setattr("dpfed.training.run_folder.folder._reopened", lambda path: full.open("w"))
    with pytest.raises(DpfedError, match=r"metrics\.jsonl cannot be written: No space left"):
        run(CONFIG, tmp_path / "r")


# --- folders ---


def test_a_read_only_folder_is_refused(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A read-only file system allows reading, and neither a new run nor resuming."""
    sets = [word for key in KEYS.split() for word in ("--set", key)]
    out = small_disk / "r"
    with pytest.raises(CrashError):
        run(CONFIG, out, callbacks=[Watcher(on_round=crash(2))])
    before = contents(out)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for args in ([*sets, "--out", str(small_disk / "new")], ["--resume", str(out)]):
        capsys.readouterr()
        assert dpfed("run", *args) == 2
        err = capsys.readouterr().err.strip().splitlines()
        assert len(err) == 1
        assert "Read-only file system" in err[0]
    assert dpfed("privacy", str(out)) == 0
    assert contents(out) == before
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert dpfed("run", "--resume", str(out)) == 0


def test_a_denied_permission_gives_a_one_sentence_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root ignores permissions, so the test raises the error itself."""
    opened = os.open

    def denied(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if Path(path).is_relative_to(tmp_path) and flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DpfedError, match=r"the run folder .* cannot be written: Permission denied"):
        run(CONFIG, tmp_path / "r")


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock in another process."""
    command = [sys.executable, "-c", HOLD, str(path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    yield
    other.communicate()


@pytest.mark.parametrize(
    ("lock", "words"),
    [(".lock", "another run is at work"), ("ledger.sqlite.lock", "another process")],
)
def test_a_folder_or_ledger_in_use_is_refused(
    lock: str, words: str, tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "r"
    with pytest.raises(CrashError):
        run(CONFIG, out, callbacks=[Watcher(on_round=crash(2))])
    before = contents(out)
    with held(out / lock), pytest.raises(DpfedError, match=words):
        run(CONFIG, out, mode="resume")
    assert contents(out) == before
    run(CONFIG, out, mode="resume")
    same(whole, out)


def test_a_folder_of_a_running_run_is_refused(tmp_path: Path) -> None:
    """A new, a forced and a resumed run start while the first run is in round 1."""
    out, said = tmp_path / "r", []

    def second(round: Round) -> None:
        if round.t == 1:
            before = contents(out)
            for mode in ("new", "replace", "resume"):
                with pytest.raises(DpfedError) as caught:
                    run(PLAIN, out, mode)
                said.append(str(caught.value))
            assert contents(out) == before

    run(PLAIN, out, callbacks=[Watcher(on_round=second)])
    assert [("another run is at work" in sentence) for sentence in said] == [False, True, True]
    assert "already holds a run" in said[0]


def test_a_run_can_start_in_the_folder_of_a_run_killed_at_its_start(
    tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "r"
    out.mkdir()
    (out / ".lock").touch()
    (out / ".config.toml.part").write_text("[data")
    run(CONFIG, out)
    same(whole, out)
    assert not (out / ".config.toml.part").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DpfedError, match="not empty and not a run"):
        run(CONFIG, tmp_path / "mine")


def test_lost_or_damaged_metrics_are_refused(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "r"
    with pytest.raises(CrashError):
        run(CONFIG, out, callbacks=[Watcher(on_round=crash(3))])
    path = out / "metrics.jsonl"
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)
    for bad in (
        b"",
        b"\xff\xfe" + good[2:],
        b"".join([lines[0], *lines[2:]]),
        lines[0] + b'{"round": 1}\n{"round": 2}\n',
    ):
        path.write_bytes(bad)
        with pytest.raises(DpfedError, match="does not hold rounds 0 to 2"):
            run(CONFIG, out, mode="resume")
    path.unlink()
    with pytest.raises(DpfedError, match="does not hold rounds 0 to 2"):
        run(CONFIG, out, mode="resume")
    path.write_bytes(good + b'{"round": 3, "acc\xff')
    run(CONFIG, out, mode="resume")
    same(whole, out)

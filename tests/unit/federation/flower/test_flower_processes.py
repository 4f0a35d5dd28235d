"""Processes of Flower: ports, secrets, logs, and keepers that end with their parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from processes import children_of, running, wait_until_ended

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.flower import keeper, processes
from dpfed.federation.flower.processes import (
    KEEPER,
    Notes,
    Process,
    flwr,
    free_port,
    last_line,
    listening,
    secret_file,
)
from dpfed.federation.links import Address


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(DpfedError, match="nothing can listen on"):
            listening(Address("127.0.0.1", other.getsockname()[1]))
    listening(Address("127.0.0.1", free_port())).close()


def test_a_port_that_becomes_free_is_waited_for() -> None:
    other = listening(Address("127.0.0.1", 0))
    threading.Timer(0.5, other.close).start()
    found = listening(Address("127.0.0.1", other.getsockname()[1]), patience=20.0)
    found.close()


def test_a_secret_is_its_owners_alone_and_new_each_time(tmp_path: Path) -> None:
    first = secret_file(tmp_path / "home").read_text()
    path = secret_file(tmp_path / "home")
    assert path.read_text() != first
    assert len(first) == 64
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_reason_is_what_the_guard_or_the_last_error_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == "it wrote nothing"
    log.write_text(
        "\x1b[92mINFO \x1b[0m:  fine\n"
        "\x1b[91mERROR \x1b[0m:  Exit Code: 600\nno such key\n\nINFO: over\n"
    )
    assert last_line(log) == "ERROR : Exit Code: 600 no such key"
    assert last_line(log, log.stat().st_size) == "it wrote nothing"
    with log.open("a") as file:
        file.write("dpfed: the certificate has expired\nERROR: code 9\n")
    assert last_line(log) == "the certificate has expired"


def test_notes_of_the_guard_are_repeated_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("dpfed: before\n")
    notes = Notes(log)
    assert notes.new() == []
    with log.open("a") as file:
        file.write("INFO: other\ndpfed: one\ndpfed: tw")
        file.flush()
        assert notes.new() == ["one"]
        file.write("o\n")
        file.flush()
        assert notes.new() == ["two"]
    assert notes.new() == []


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"flwr no-such-verb has failed: .*No such command"):
        flwr(tmp_path, "no-such-verb")


def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DpfedError, match=r"flower-nothing is not there: pip install"):
        processes.program("flower-nothing")


def test_a_port_of_another_user_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert keeper.is_own(port)
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert not keeper.is_own(port)
    # Nothing listens here now.
    assert keeper.is_own(port)


# ------------------------------------------------------------------ keepers

LISTEN = "import socket,sys,time; s=socket.socket(); s.bind(('127.0.0.1',int(sys.argv[1])))"
MAIN = f"{LISTEN}; s.listen(); time.sleep(60)"
SLEEP = "import time; time.sleep(60)"
# A process that starts a keeper, prints its id and waits.
PARENT = """
import json, subprocess, sys, time
plan = sys.argv[1]
fd = int(sys.argv[2])
keeper = subprocess.Popen(json.loads(sys.argv[3]), stdin=subprocess.PIPE, pass_fds=[fd])
keeper.stdin.write(plan.encode() + b"\\nexecutor\\n")
keeper.stdin.flush()
print(keeper.pid, flush=True)
time.sleep(60)
"""


def plan_of(guard: socket.socket, main: str = MAIN) -> dict[str, Any]:
    port = free_port()
    return {
        "command": [sys.executable, "-c", main, str(port)],
        "executor": [sys.executable, "-c", SLEEP],
        "port": port,
        "socket": guard.fileno(),
        "upstream": f"http://127.0.0.1:{port}",
        "authority": "",
        "tls": [],
        "client": False,
    }


def started(guard: socket.socket, log: Path, main: str = MAIN) -> Process:
    """Start a keeper as a child of this process."""
    with log.open("wb") as out:
        popen = subprocess.Popen(
            KEEPER,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=[guard.fileno()],
        )
    process = Process("SuperLink", popen, log, Address("127.0.0.1", 1))
    process.order(json.dumps(plan_of(guard, main)))
    return process


def children(pid: int, count: int) -> list[int]:
    end = time.monotonic() + 60
    while len(children_of(pid)) < count:
        assert time.monotonic() < end, f"{pid} has not {count} children"
        time.sleep(0.05)
    return children_of(pid)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.fixture
def guard() -> Any:
    with listening(Address("127.0.0.1", 0)) as found:
        yield found


def test_a_keeper_starts_freezes_and_ends_its_processes(guard: Any, tmp_path: Path) -> None:
    process = started(guard, tmp_path / "log")
    children(process.popen.pid, 1)
    process.order("executor")
    main, executor = children(process.popen.pid, 2)
    process.alive()
    process.order("freeze")
    end = time.monotonic() + 30
    while state_of(executor) != "T":
        assert time.monotonic() < end
        time.sleep(0.05)
    process.end()
    wait_until_ended([main, executor, process.popen.pid])
    with pytest.raises(StoppedError, match="the SuperLink has ended"):
        process.alive()


def test_a_keeper_ends_when_its_main_process_ends(guard: Any, tmp_path: Path) -> None:
    process = started(guard, tmp_path / "log", "import sys; sys.exit(7)")
    assert process.popen.wait(60) == 7
    process.end()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("victim", ["parent", "keeper"])
def test_nothing_outlives_a_parent_or_a_keeper_that_was_killed(guard: Any, victim: str) -> None:
    arguments = [json.dumps(plan_of(guard)), str(guard.fileno()), json.dumps(KEEPER)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdout=subprocess.PIPE,
        pass_fds=[guard.fileno()],
    )
    assert parent.stdout is not None
    own = int(parent.stdout.readline())
    below = children(own, 2)
    os.kill(parent.pid if victim == "parent" else own, signal.SIGKILL)
    wait_until_ended([*below, own], limit=20)
    if running(parent.pid):
        parent.kill()
    parent.wait()
    parent.stdout.close()

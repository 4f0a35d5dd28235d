"""Run Flower's SuperLink or SuperNode, and end it when the parent process, dpfed, ends.

    python -m dpfed.federation.flower.keeper

The keeper (this process) also runs the guard, a reverse proxy that filters requests (`guard.py`).
The first line on stdin is a `Plan` in JSON. Later lines are orders:

    executor   start Flower's SuperExec, the process that starts apps
    freeze     pause the SuperExec, so that it starts no more apps

When the parent ends or is killed, stdin ends, and the keeper ends the processes that it has
started. A SuperNode gets time to sign off at the server, so that its client can connect again at
once. If the keeper is killed, Linux ends the SuperLink or SuperNode, and the SuperExec ends itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from dpfed.federation.flower.guard import Guard, note

PDEATHSIG = 1
LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True) if LINUX else None
POLL_S = 0.2
# Seconds to wait for processes to end before they are killed. A SuperNode needs about five seconds
# to sign off at the server. A SuperLink does not sign off, and its port should be free soon.
SUPERNODE_ENDING_S = 8.0
SUPERLINK_ENDING_S = 1.0
STARTING_S = 300.0


@dataclass(frozen=True)
class Plan:
    """The commands that a keeper runs, and the settings of its guard (reverse proxy).

    command    command line of Flower's SuperLink or SuperNode
    executor   command line of Flower's SuperExec, which starts apps; the keeper appends its own
               process id
    port       local port on which the SuperLink or SuperNode listens
    socket     file descriptor of the open socket on which the guard listens
    upstream   URL to which the guard passes requests
    authority  certificate file that verifies the upstream's certificate; "" without TLS
    tls        certificate file and key file of the guard; empty without TLS
    client     True at a client, False at the server
    """

    command: list[str]
    executor: list[str]
    port: int
    socket: int
    upstream: str
    authority: str
    tls: list[str]
    client: bool


def die_with_parent() -> None:
    """Let Linux end the process that calls this when its parent, the keeper, is killed."""
    if LIBC is not None:
        LIBC.prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, so that the whole group can be ended."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent if LINUX else None,
    )


def serve_guard(plan: Plan) -> None:
    verify: ssl.SSLContext | bool = False
    if plan.authority:
        verify = ssl.create_default_context(cafile=plan.authority)
    config = uvicorn.Config(
        Guard(plan.upstream, verify, plan.client),
        ssl_certfile=plan.tls[0] if plan.tls else None,
        ssl_keyfile=plan.tls[1] if plan.tls else None,
        log_level="error",
        lifespan="off",
        ws="none",
        timeout_keep_alive=120,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=plan.socket)])


class Keeper:
    """Starts and ends Flower's processes: a SuperLink or SuperNode, and a SuperExec."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # Start this process before the thread of the guard (reverse proxy). Forking a program with
        # several threads can cause a deadlock.
        self._main = start(plan.command)
        self._executor: subprocess.Popen[bytes] | None = None
        self._waiting_since: float | None = None
        self.ending = False

    def order(self, line: str) -> None:
        if line == "executor":
            self._waiting_since = time.monotonic()
        elif line == "freeze" and self._executor is not None:
            os.kill(self._executor.pid, signal.SIGSTOP)

    def step(self) -> None:
        """Start Flower's SuperExec if dpfed has ordered it and the SuperLink or SuperNode is ready.

        Set `ending` if a process has ended.
        """
        if self._main.poll() is not None or (self._executor and self._executor.poll() is not None):
            self.ending = True
        if self._waiting_since is None or self._executor is not None:
            return
        with suppress(OSError):
            if not is_own(self._plan.port):
                note(f"port {self._plan.port} was taken by another user's process")
                self.ending = True
                return
            socket.create_connection(("127.0.0.1", self._plan.port), 1.0).close()
            self._executor = start([*self._plan.executor, "--parent-pid", str(os.getpid())])
            return
        if time.monotonic() > self._waiting_since + STARTING_S:
            note("Flower did not open its port")
            self.ending = True

    def end(self) -> int:
        """End all processes, and return the exit code of the SuperLink or SuperNode."""
        running = [each for each in (self._main, self._executor) if each is not None]
        for process in running:
            for number in (signal.SIGCONT, signal.SIGTERM):
                signal_group(process, number)
        patience = SUPERNODE_ENDING_S if self._plan.client else SUPERLINK_ENDING_S
        limit = time.monotonic() + patience
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
            signal_group(process, signal.SIGKILL)
        return self._main.wait()


def is_own(port: int) -> bool:
    """Return True if all processes that listen on a local port belong to this user.

    The port was free when dpfed chose it, but another user may take it before Flower does. Without
    /proc, which lists the ports, the result is True.
    """
    owners = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    owners.append(int(fields[7]))
    return all(uid == os.getuid() for uid in owners)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def lines_of(descriptor: int) -> list[str] | None:
    """Return the orders of dpfed that have arrived on stdin; None if stdin has ended."""
    if not select.select([descriptor], [], [], POLL_S)[0]:
        return []
    text = os.read(descriptor, 1 << 16).decode()
    return text.split() if text else None


def main() -> None:
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
        plan = Plan(**json.loads(stdin.readline()))
    keeper = Keeper(plan)
    threading.Thread(target=serve_guard, args=(plan,), daemon=True).start()
    while not (keeper.ending or asked):
        orders = lines_of(0)
        if orders is None:
            break
        for line in orders:
            keeper.order(line)
        keeper.step()
    code = keeper.end()
    # Use os._exit. sys.exit could wait for the thread of the guard (reverse proxy), which does not
    # end.
    os._exit(code if 0 <= code < 256 else 1)


if __name__ == "__main__":
    main()

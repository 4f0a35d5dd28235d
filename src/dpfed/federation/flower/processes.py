"""Run Flower's commands: SuperLink (at the server), SuperNode (at a client) and `flwr`.

SuperLink and SuperNode run in a keeper, a process that ends them when dpfed ends (`keeper.py`). All
commands run without telemetry, update checks and installation of packages.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation import keys
from dpfed.federation.client_config import LinkSection
from dpfed.federation.flower.app_folder import RELAY
from dpfed.federation.links import QUIET, Address, refuse_insecure
from dpfed.privacy.ledger.private_files import OWNER_UMASK, make_private_folder, open_private

KEEPER = [sys.executable, "-m", "dpfed.federation.flower.keeper"]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Log lines of Flower that begin with these words never explain why a process has ended.
IRRELEVANT = ("INFO", "WARNING", "For more information", "Finished")
# Lines that dpfed itself writes to the log begin with this mark, by which they are found.
MARK = "dpfed: "
# Seconds that a keeper has to end its processes, before it is killed.
ENDING_S = 12.0
COMMAND_S = 300.0
# Longest wait in seconds until a port is free. The keeper of a killed server frees its port soon.
PORT_S = 10.0
# Name under which Flower's configuration file lists the server's SuperLink. The `flwr` commands
# find the SuperLink by this name.
LINK_NAME = "dpfed"


@dataclass(frozen=True)
class Process:
    """A running SuperLink or SuperNode, with its keeper (the process that ends it).

    kind     "SuperLink" or "SuperNode"
    popen    the process of the keeper
    log      file with the output of all processes that the keeper runs
    address  address at which processes on this machine reach the SuperLink or SuperNode
    """

    kind: str
    popen: subprocess.Popen[bytes]
    log: Path
    address: Address

    def alive(self) -> None:
        """Raise StoppedError if the keeper, which runs the SuperLink or SuperNode, has ended."""
        if self.popen.poll() is not None:
            raise StoppedError(
                f"the {self.kind} has ended ({last_line(self.log)}): all of it is in {self.log}"
            )

    def order(self, line: str) -> None:
        """Send an order such as "freeze" to the keeper process; raise no error if it has ended."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()
        except OSError:
            return

    def end(self) -> None:
        """Let the keeper end its processes and itself, and wait until it has ended."""
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()
        try:
            self.popen.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment variables for Flower's programs.

    PATH begins with the folder of their commands, because the programs start each other by name.
    """
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    own = {"FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1", "PATH": path}
    return {**os.environ, **QUIET, **own}


def program(name: str) -> str:
    """Return the path of Flower's command `name`; raise DpfedError if it is not installed."""
    found = shutil.which(name, path=flower_environment(Path())["PATH"])
    if found is None:
        raise DpfedError(f"Flower's command {name} is not there: pip install 'dpfed[flower]'")
    return found


def listening(address: Address, patience: float = 0.0) -> socket.socket:
    """Return a socket that listens at `address`.

    Raise DpfedError if another process still uses the port after `patience` seconds.
    """
    end = time.monotonic() + patience
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    while True:
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((address.host, address.port))
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise DpfedError(
                    f"nothing can listen on {address} ({error.strerror}): choose another --listen"
                ) from None
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def superlink(listen: Address, home: Path, folder: Path | None) -> Iterator[Process]:
    """Run a SuperLink (Flower's process at the server) until the context ends.

    listen  address of its guard, the reverse proxy to which clients connect
    home    folder for Flower's files and the log
    folder  folder of the TLS keys; None for no encryption
    """
    own = Address("127.0.0.1", free_port())
    tls = ["--insecure"]
    executor = ["--insecure"]
    if folder is None:
        refuse_insecure(listen)
    else:
        files = {
            "certfile": folder / keys.SERVER,
            "keyfile": folder / keys.SERVER_KEY,
            "ca-certfile": folder / keys.AUTHORITY,
        }
        tls = [word for name, file in files.items() for word in (f"--ssl-{name}", str(file))]
        tls += ["--enable-supernode-auth"]
        executor = ["--root-certificates", str(folder / keys.AUTHORITY)]
    install = "--disable-runtime-dependency-installation"
    process = _keep(
        "superlink",
        [*tls, install],
        executor,
        listening(listen, PORT_S),
        own,
        home,
        upstream=_url(own, folder is not None),
        authority=str(folder / keys.AUTHORITY) if folder else "",
        tls=[str(folder / keys.SERVER), str(folder / keys.SERVER_KEY)] if folder else [],
    )
    try:
        yield process
    finally:
        process.end()


@contextmanager
def supernode(
    server: Address, home: Path, link: LinkSection | None, relay: str
) -> Iterator[Process]:
    """Run a SuperNode (Flower's process at a client) until the context ends.

    server  address of the server, to which its guard (a reverse proxy) connects
    home    folder for Flower's files and the log
    link    section [link] of client.toml with the keys; None for no encryption
    relay   path of the socket through which `dpfed client` gets the messages
    """
    own = Address("127.0.0.1", free_port())
    guard = listening(Address("127.0.0.1", 0))
    port = guard.getsockname()[1]
    arguments = ["--superlink", f"127.0.0.1:{port}", "--node-config", f'{RELAY}="{relay}"']
    tls: list[str] = []
    if link is None:
        refuse_insecure(server)
        arguments += ["--insecure"]
    else:
        # Flower's SuperNode uses its key only over TLS. Its TLS connection ends at the guard, so
        # the guard needs a certificate for this machine.
        authority, *found = keys.make_local(home / "local")
        tls = [str(path) for path in found]
        arguments += ["--root-certificates", str(authority)]
        arguments += ["--auth-supernode-private-key", link.key]
    process = _keep(
        "supernode",
        arguments,
        ["--insecure"],
        guard,
        own,
        home,
        upstream=_url(server, link is not None),
        authority=link.ca if link else "",
        tls=tls,
    )
    try:
        process.order("executor")
        yield process
    finally:
        process.end()


def _url(address: Address, tls: bool) -> str:
    return f"{'https' if tls else 'http'}://{address}"


def _keep(
    kind: str,
    arguments: Sequence[str],
    executor: Sequence[str],
    guard: socket.socket,
    own: Address,
    home: Path,
    **plan: object,
) -> Process:
    """Start the keeper of a SuperLink or SuperNode; its log is in the folder `home`.

    arguments  further arguments of the SuperLink or SuperNode
    executor   further arguments of the SuperExec, Flower's process that starts apps
    guard      socket on which the guard (a reverse proxy) listens
    own        local address for the SuperLink or SuperNode
    plan       further fields of `keeper.Plan`
    """
    make_private_folder(home)
    secret = ["--superexec-auth-secret-file", str(secret_file(home))]
    listen = ["--host", own.host, "--port", str(own.port), "--isolation", "process"]
    plan |= {
        "command": [program(f"flower-{kind}"), *listen, *secret, *arguments],
        "executor": [
            program("flower-superexec"),
            *("--runtime-api-address", str(own)),
            *secret,
            *executor,
        ],
        "port": own.port,
        "socket": guard.fileno(),
        "client": kind == "supernode",
    }
    log = home / f"{kind}.log"
    with guard, open_private(log, "ab") as out:
        popen = subprocess.Popen(
            KEEPER,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=flower_environment(home),
            start_new_session=True,
            umask=OWNER_UMASK,
            pass_fds=[guard.fileno()],
        )
    process = Process("SuperLink" if kind == "superlink" else "SuperNode", popen, log, own)
    process.order(json.dumps(plan))
    return process


def secret_file(home: Path) -> Path:
    """Write a new secret to a file that only its owner can read, and return the path.

    Flower's SuperExec (the process that starts apps) proves with this secret that it may do so.
    Flower reads the secret only from a file.
    """
    make_private_folder(home)
    path = home / "secret"
    path.unlink(missing_ok=True)
    with open_private(path, "x") as file:
        file.write(secrets.token_hex(32))
    return path


def flwr(home: Path, *words: str) -> str:
    """Run Flower's command `flwr` and return its output; raise DpfedError if it fails."""
    try:
        done = subprocess.run(
            [program("flwr"), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=flower_environment(home),
            timeout=COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        raise DpfedError(f"flwr {words[0]} has not ended within {COMMAND_S:g} s") from None
    if done.returncode != 0:
        output = COLOURS.sub("", done.stdout + done.stderr)
        raise DpfedError(f"flwr {words[0]} has failed: {' '.join(output.split())[-300:]}")
    return done.stdout


def wait_open(process: Process, limit: float = 300.0) -> None:
    """Wait until a SuperLink or SuperNode accepts connections; raise DpfedError after `limit` s."""
    end = time.monotonic() + limit
    while True:
        process.alive()
        try:
            socket.create_connection((process.address.host, process.address.port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise DpfedError(f"the {process.kind} did not come up: see {process.log}") from None
            time.sleep(0.1)


def log_size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


class Notes:
    """Reads the lines that the guard (reverse proxy) writes to a log, from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = log_size(log)

    def new(self) -> list[str]:
        """Return the complete lines that the guard (reverse proxy) wrote since the last call."""
        if log_size(self._log) <= self._read:
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]


def log_lines(log: Path, start: int) -> list[str]:
    """Return the non-empty lines of a log after byte `start`, from at most its last 8 KiB."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 8192))
            text = COLOURS.sub("", file.read().decode(errors="replace"))
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def last_line(log: Path, start: int = 0) -> str:
    """Return the reason why a process has ended, from its log after byte `start`.

    This is the last line that dpfed's guard has written. Without one, it is Flower's last error,
    and without an error, it is the last line of the log.
    """
    lines = [line for line in log_lines(log, start) if not line.startswith(IRRELEVANT)]
    own = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    errors = [i for i, line in enumerate(lines) if line.startswith(("ERROR", "CRITICAL"))]
    reason = own[-1:] or (lines[errors[-1] : errors[-1] + 3] if errors else lines[-1:])
    return " ".join(" ".join(reason).split())[:200] or "it wrote nothing"

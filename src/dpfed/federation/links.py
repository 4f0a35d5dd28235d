"""Run Flower's SuperLink (for the server) or SuperNode (for a client) as a child process.

Both run without telemetry, update checks and installation of packages. Connections use TLS and
keys. Without TLS and keys, both processes communicate only within this machine.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation import keys
from dpfed.federation.client_config import DEFAULT_PORT, LinkSection
from dpfed.federation.flower.child import SECRET_VARIABLE
from dpfed.privacy.ledger.private_files import OWNER_UMASK, make_private_folder, open_private

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CHILD = "dpfed.federation.flower.child"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Log lines that begin with these words never explain why a process has ended.
IRRELEVANT = ("INFO", "WARNING", "For more information", "Finished")
# Seconds to wait for a process to end before it is killed. A SuperNode needs about five.
ENDING = 8.0


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def own(self) -> Address:
        """The address at which processes on this machine reach a process that listens on `self`."""
        if self.host in ("0.0.0.0", "::", "localhost"):
            return Address("127.0.0.1", self.port)
        return self


def address_of(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or "/" in text or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise DpfedError(
            f"{text!r} is not an address: give host:port, as in hub.example.org:{DEFAULT_PORT}"
        )
    return Address(host, int(port))


def refuse_insecure(address: Address) -> None:
    if not address.loopback:
        raise DpfedError(
            f"--insecure is for tests on this machine and {address} is not on it: "
            "leave it out, and give keys (`dpfed keys`)"
        )


def check_link(link: LinkSection, insecure: bool) -> Address:
    """Return the server's address after checking the certificate and key files of [link].

    With `insecure`, no files are needed or checked, but the address must be on this machine.
    """
    address = address_of(link.address)
    if insecure:
        refuse_insecure(address)
        return address
    for key in ("ca", "key"):
        if not getattr(link, key):
            raise DpfedError(
                f"client.toml lacks link.{key}: "
                "`dpfed keys` makes one, or use --insecure on one machine"
            )
    if not Path(link.ca).is_file():
        raise DpfedError(
            f"link.ca = {link.ca} is not there: it is the ca.crt that the server's people hand out"
        )
    keys.check_private(Path(link.key))
    return address


def client_keys(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the public key of each client, read from `folder`, in PEM format.

    Raise DpfedError if two clients share a key, because a key identifies exactly one client.
    """
    found = {name: keys.public_key(folder / keys.CLIENTS / f"{name}.pub") for name in names}
    owners: dict[bytes, str] = {}
    for name, key in found.items():
        if owners.setdefault(key, name) != name:
            raise DpfedError(
                f"clients {owners[key]!r} and {name!r} have the same key: each needs its own"
            )
    return found


@dataclass(frozen=True)
class Process:
    """A SuperLink or SuperNode as a child process, with its log file."""

    kind: str
    popen: subprocess.Popen[bytes]
    log: Path

    def alive(self) -> None:
        """Raise StoppedError if the process has ended."""
        if self.popen.poll() is not None:
            raise StoppedError(
                f"the {self.kind} has ended ({last_line(self.log)}): all of it is in {self.log}"
            )

    def end(self) -> None:
        """Ask the process to end, kill it after ENDING seconds, and wait until it has ended."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(ENDING)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        self.popen.wait()


def start(kind: str, arguments: Sequence[str], home: Path, secret: str = "") -> Process:
    """Start a `superlink` or `supernode` with these arguments, and return the process.

    The child ends when this process ends. The folder `home` gets the child's log file. The child
    reads `secret` from an environment variable.
    """
    make_private_folder(home)
    log = home / f"{kind}.log"
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    if secret:
        environment[SECRET_VARIABLE] = secret
    command = [sys.executable, "-m", CHILD, kind, str(os.getpid()), *arguments]
    with open_private(log, "ab") as out:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            umask=OWNER_UMASK,
        )
    return Process("SuperLink" if kind == "superlink" else "SuperNode", popen, log)


@contextmanager
def superlink(listen: Address, home: Path, folder: Path | None) -> Iterator[tuple[Process, str]]:
    """Run a SuperLink with the TLS keys in `folder`, or without encryption if `folder` is None.

    Yield the process and the secret that the dpfed server needs to connect. Leaving the context
    ends the process.
    """
    secret = secrets.token_hex(32)
    arguments = _process_options(listen, home, secret)
    if folder is None:
        refuse_insecure(listen)
        arguments += ["--insecure"]
    else:
        files = {
            "certfile": folder / keys.SERVER,
            "keyfile": folder / keys.SERVER_KEY,
            "ca-certfile": folder / keys.AUTHORITY,
        }
        for option, file in files.items():
            if not file.is_file():
                raise DpfedError(
                    f"{file} is not there: `dpfed keys {folder} --server HOST` makes it"
                )
            arguments += [f"--ssl-{option}", str(file)]
        arguments += ["--enable-supernode-auth"]
    refuse_taken(listen)
    process = start("superlink", arguments, home, secret)
    try:
        wait_open(listen.own, process)
        yield process, secret
    finally:
        process.end()


def supernode(
    server: Address, home: Path, link: LinkSection | None
) -> tuple[Process, Address, str]:
    """Start a SuperNode with the keys of [link], or without encryption if `link` is None.

    Return the process, the local address where it hands out tasks, and the secret to fetch them.
    """
    secret = secrets.token_hex(32)
    own = Address("127.0.0.1", free_port())
    arguments = ["--superlink", str(server), *_process_options(own, home, secret)]
    if link is None:
        refuse_insecure(server)
        arguments += ["--insecure"]
    else:
        arguments += ["--root-certificates", link.ca, "--auth-supernode-private-key", link.key]
    return start("supernode", arguments, home), own, secret


def _process_options(listen: Address, home: Path, secret: str) -> list[str]:
    options = ["--host", listen.host, "--port", str(listen.port), "--isolation", "process"]
    return [*options, "--superexec-auth-secret-file", str(secret_file(home, secret))]


def secret_file(home: Path, secret: str) -> Path:
    """Write the secret to a file that only its owner can read, and return the path.

    Flower accepts this secret only from a file.
    """
    make_private_folder(home)
    path = home / "secret"
    path.unlink(missing_ok=True)
    with open_private(path, "x") as file:
        file.write(secret)
    return path


def refuse_taken(listen: Address) -> None:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise DpfedError(
                f"nothing can listen on {listen} ({error.strerror}): choose another --listen"
            ) from None


def wait_open(address: Address, process: Process, limit: float = 60.0) -> None:
    """Wait until the process accepts connections; raise DpfedError after `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        process.alive()
        try:
            socket.create_connection((address.host, address.port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise DpfedError(f"the {process.kind} did not come up: see {process.log}") from None
            time.sleep(0.1)


def is_own(address: Address) -> bool:
    """Return True if all processes that listen on the port belong to this user.

    This program chooses a free port for its child process. Another user may take the port before
    the child does. Without /proc, which lists the ports, the result is True.
    """
    owners = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == address.port:
                    owners.append(int(fields[7]))
    return all(uid == os.getuid() for uid in owners)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_line(log: Path, start: int = 0) -> str:
    """Return the last error in a Flower log after byte `start`, or else the last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 8192))
            text = COLOURS.sub("", file.read().decode(errors="replace"))
    except OSError:
        return "it wrote nothing"
    stripped = [line.strip() for line in text.splitlines()]
    lines = [line for line in stripped if line and not line.startswith(IRRELEVANT)]
    errors = [i for i, line in enumerate(lines) if line.startswith(("ERROR", "CRITICAL"))]
    reason = lines[errors[-1] : errors[-1] + 3] if errors else lines[-1:]
    return " ".join(" ".join(reason).split())[:200] or "it wrote nothing"


def need_flower() -> None:
    """Import Flower with telemetry switched off; raise DpfedError if it is not installed."""
    os.environ.update(QUIET)
    logging.getLogger("flwr").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise DpfedError("a federation needs Flower: pip install 'dpfed[flower]'") from None

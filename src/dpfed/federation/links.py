"""What a server and a client say to each other through: addresses, and Flower's processes, which end with ours.

Telemetry, update checks and installing at run time are off in every one of them. TLS and node keys are on; without them
nothing listens or connects but on this machine itself.
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
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen

from dpfed.config import Registry, parse
from dpfed.errors import DpfedError, StoppedError
from dpfed.federation import keys, policy
from dpfed.privacy.private_files import OWNER_UMASK, make_private_folder, open_private

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CHILD = "dpfed.federation.flower.child"
PORT = 8000
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NOISE = ("INFO", "WARNING", "For more information", "Finished")
ENDING = 8.0  # seconds that a process has to end by itself; a SuperNode takes five of them


@dataclass(frozen=True)
class LinkSection:
    """[link] of client.toml: where the server is, and by what the two know each other."""

    address: Annotated[str, MinLen(1), "host:port of the server"] = f"127.0.0.1:{PORT}"
    ca: Annotated[str, "certificate of the authority that has signed the server's"] = ""
    key: Annotated[str, "this client's private key"] = ""


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
        """How this machine itself reaches what listens here."""
        if self.host in ("0.0.0.0", "::", "localhost"):
            return Address("127.0.0.1", self.port)
        return self


def address_of(text: str) -> Address:
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or "/" in text or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise DpfedError(
            f"{text!r} is not an address: give host:port, as in hub.example.org:{PORT}"
        )
    return Address(host, int(port))


def refuse_insecure(address: Address) -> None:
    if not address.loopback:
        raise DpfedError(
            f"--insecure is for tests on this machine and {address} is not on it: leave it out, and give keys (`dpfed keys`)"
        )


def load_client(path: Path, registry: Registry) -> tuple[policy.ClientConfig, LinkSection]:
    """A client.toml with its [link]; relative paths in it are taken from where the file is."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DpfedError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise DpfedError(f"{path} is not valid TOML: {error}") from None
    given = raw.pop("link", {})
    if not isinstance(given, dict):
        raise DpfedError(f"link = {given!r} must be a table, [link]")
    link: LinkSection = parse("link", LinkSection, given)
    config = policy.build(raw, registry)

    def beside(text: str) -> str:
        return str(path.parent / Path(text).expanduser()) if text else ""

    config = replace(config, client=replace(config.client, state=beside(config.client.state)))
    return config, replace(link, ca=beside(link.ca), key=beside(link.key))


def check_link(link: LinkSection, insecure: bool) -> Address:
    """The address, once all that it needs is there."""
    address = address_of(link.address)
    if insecure:
        refuse_insecure(address)
        return address
    for key in ("ca", "key"):
        if not getattr(link, key):
            raise DpfedError(
                f"client.toml lacks link.{key}: `dpfed keys` makes one, or use --insecure on one machine"
            )
    if not Path(link.ca).is_file():
        raise DpfedError(
            f"link.ca = {link.ca} is not there: it is the ca.crt that the server's people hand out"
        )
    keys.check_private(Path(link.key))
    return address


def client_keys(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The public key of every client; two with one key would be one client with two budgets."""
    found = {name: keys.public_key(folder / keys.CLIENTS / f"{name}.pub") for name in names}
    owners: dict[bytes, str] = {}
    for name, key in found.items():
        if key in owners:
            raise DpfedError(
                f"clients {owners[key]!r} and {name!r} have the same key: each needs its own"
            )
        owners[key] = name
    return found


@dataclass(frozen=True)
class Process:
    """A child of ours, and where it writes."""

    kind: str
    popen: subprocess.Popen[bytes]
    log: Path

    def alive(self) -> None:
        if self.popen.poll() is not None:
            raise StoppedError(
                f"the {self.kind} has ended ({last_line(self.log)}): all of it is in {self.log}"
            )

    def end(self) -> None:
        """Asked first, then killed; by its own id, and over when this returns."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(ENDING)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        self.popen.wait()


def start(kind: str, arguments: Sequence[str], home: Path, secret: str = "") -> Process:
    """`superlink` or `supernode` with its log in `home`; it ends when this process does, however that comes about."""
    make_private_folder(home)
    log = home / f"{kind}.log"
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    if secret:
        environment["DPFED_LINK_SECRET"] = secret
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
    """A SuperLink with the keys in `folder`, and the secret that it takes orders by; without a folder it is insecure."""
    secret = secrets.token_hex(32)
    arguments = ["--host", listen.host, "--port", str(listen.port), "--isolation", "process"]
    arguments += ["--superexec-auth-secret-file", str(secret_file(home, secret))]
    if folder is None:
        refuse_insecure(listen)
        arguments += ["--insecure"]
    else:
        for option, name in (
            ("certfile", keys.SERVER),
            ("keyfile", keys.SERVER_KEY),
            ("ca-certfile", keys.AUTHORITY),
        ):
            if not (folder / name).is_file():
                raise DpfedError(
                    f"{folder / name} is not there: `dpfed keys {folder} --server HOST` makes it"
                )
            arguments += [f"--ssl-{option}", str(folder / name)]
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
    """A SuperNode, where it takes our orders, and the secret for them; without [link]'s keys it is insecure."""
    secret = secrets.token_hex(32)
    own = Address("127.0.0.1", free_port())
    arguments = [
        "--superlink",
        str(server),
        "--isolation",
        "process",
        "--host",
        own.host,
        "--port",
        str(own.port),
    ]
    arguments += ["--superexec-auth-secret-file", str(secret_file(home, secret))]
    if link is None:
        refuse_insecure(server)
        arguments += ["--insecure"]
    else:
        arguments += ["--root-certificates", link.ca, "--auth-supernode-private-key", link.key]
    return start("supernode", arguments, home), own, secret


def secret_file(home: Path, secret: str) -> Path:
    """Readable by its owner alone; Flower takes this secret only from a file."""
    make_private_folder(home)
    path = home / "secret"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
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
    """Whether who listens there is a process of this user: between choosing a port and using it another may take it.

    Where the system does not tell (no /proc), it is believed.
    """
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == address.port:
                    found.append(int(fields[7]))
    return all(uid == os.getuid() for uid in found)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_line(log: Path, start: int = 0) -> str:
    """Why a process of Flower's ended, as its log has it: what its last error says, or else the last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 8192))
            lines = COLOURS.sub("", file.read().decode(errors="replace")).splitlines()
    except OSError:
        return "it wrote nothing"
    said = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(NOISE)]
    errors = [i for i, line in enumerate(said) if line.startswith(("ERROR", "CRITICAL"))]
    told = said[errors[-1] : errors[-1] + 3] if errors else said[-1:]
    return " ".join(" ".join(told).split())[:200] if told else "it wrote nothing"


def quiet_here() -> None:
    """The same settings for what of Flower runs in this process; before it is imported."""
    os.environ.update(QUIET)
    logging.getLogger("flwr").addFilter(lambda record: record.levelno >= logging.ERROR)


def need_flower() -> None:
    quiet_here()
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise DpfedError("a federation needs Flower: pip install 'dpfed[flower]'") from None

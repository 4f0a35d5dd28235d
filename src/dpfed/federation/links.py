"""Addresses in a federation, and checks of certificates and keys before it starts.

Connections use TLS, and keys identify the clients. Without TLS and keys (`--insecure`), server and
clients must be on one machine.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dpfed.errors import DpfedError
from dpfed.federation import keys
from dpfed.federation.certificates import check_valid
from dpfed.federation.client_config import LinkSection
from dpfed.federation.site_files import DEFAULT_PORT

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


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
    """Return the server's address, after checking the files that [link] in client.toml names.

    These are a certificate and the client's private key. With `insecure`, no files are checked, but
    the address must be on this machine.
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
    check_valid(Path(link.ca))
    keys.check_private(Path(link.key))
    return address


def client_keys(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the public key of each client in `names`, read from `folder`, in PEM format.

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


def need_flower() -> None:
    """Raise DpfedError if Flower is not installed. Also switch its telemetry off."""
    os.environ.update(QUIET)
    if find_spec("flwr") is None:
        raise DpfedError("a federation needs Flower: pip install 'dpfed[flower]'")

"""Make keys for a trial federation: a certificate authority, the server's key, the clients' keys.

    DIR/ca.crt  ca.key               the authority; ca.key signs server certificates only
    DIR/server.crt  server.key       certificate and key of `dpfed server --keys DIR`
    DIR/clients/NAME.pub             public keys by which the server recognises its clients
    DIR/NAME/client.key  ca.crt      the folder that is handed to client NAME only, with a
             client.toml README      client.toml to fill in

In a real federation, each client makes its own key pair with `dpfed keys DIR --client NAME`. The
client then sends only the public key to the server.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dpfed.errors import DpfedError
from dpfed.federation.site_files import README, SERVER_README, site_files
from dpfed.privacy.ledger.private_files import make_private_folder, open_private

CURVE = ec.SECP384R1()
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
AUTHORITY = "ca.crt"
AUTHORITY_KEY = "ca.key"
SERVER = "server.crt"
SERVER_KEY = "server.key"
CLIENTS = "clients"
CLIENT_KEY = "client.key"
# Names that no client may have. The folder DIR contains files and folders with these names, and
# also one folder with the name of each client.
RESERVED = (CLIENTS, AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, README)
# Host names by which processes on one machine connect to each other.
LOCAL = ("localhost", "127.0.0.1", "::1")
LOCAL_DAYS = 3650


def make_all(
    folder: Path, host: str, clients: Sequence[str], days: int = 365, server: str = "server"
) -> list[Path]:
    """Write the keys and files of the server and all clients; return the paths of the files.

    folder  a new or empty folder
    host    host name or address of the server
    days    days for which the certificates are valid
    server  name of the server in requests, `federation.server`
    """
    check_names(clients)
    check_host(host)
    _refuse_used(folder)
    authority, certificate = _authority(days)
    server_key, own = _server(authority, certificate, host, days)
    authority_file = certificate.public_bytes(Encoding.PEM)
    files = {
        AUTHORITY_KEY: _private(authority),
        AUTHORITY: authority_file,
        SERVER_KEY: _private(server_key),
        SERVER: own.public_bytes(Encoding.PEM),
        README: SERVER_README.encode(),
    }
    for name in clients:
        private, public = _client_pair(name)
        files[f"{CLIENTS}/{name}.pub"] = public
        files[f"{name}/{CLIENT_KEY}"] = private
        files[f"{name}/{AUTHORITY}"] = authority_file
        for file, data in site_files(name, host, server, AUTHORITY, CLIENT_KEY).items():
            files[f"{name}/{file}"] = data
    return _write(folder, files)


def make_client(folder: Path, name: str) -> list[Path]:
    """Write the key pair of one client into a new or empty folder, and return both paths.

    The client gives only the public key, NAME.pub, to the server.
    """
    check_names([name])
    _refuse_used(folder)
    private, public = _client_pair(name)
    return _write(folder, {CLIENT_KEY: private, f"{name}.pub": public})


def make_local(folder: Path) -> tuple[Path, Path, Path]:
    """Write files for TLS on this machine alone, and return their paths.

    They are the certificate of a new authority, and the server's certificate and private key. Files
    of an earlier call are replaced. The authority's key is not stored, so nobody can sign another
    certificate with it.
    """
    authority, certificate = _authority(LOCAL_DAYS)
    key, own = _server(authority, certificate, LOCAL[0], LOCAL_DAYS)
    files = {
        AUTHORITY: certificate.public_bytes(Encoding.PEM),
        SERVER: own.public_bytes(Encoding.PEM),
        SERVER_KEY: _private(key),
    }
    for name in files:
        (folder / name).unlink(missing_ok=True)
    first, second, third = _write(folder, files)
    return first, second, third


def public_key(path: Path) -> bytes:
    """Read a public key file of `dpfed keys` or ssh-keygen, and return the key in PEM format.

    Flower reports the keys of connected clients in PEM format, too, so both can be compared.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise DpfedError(
            f"{path} cannot be read: {error.strerror}; put the client's public key there"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise DpfedError(
            f"{path} is not a public key as `dpfed keys` or ssh-keygen writes them"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise _not_elliptic(path)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def check_private(path: Path) -> None:
    """Raise DpfedError if Flower cannot use a private key file or if other users can read it."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise DpfedError(
            f"{path} cannot be read: {error.strerror}; link.key is this client's private key"
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise DpfedError(
            f"{path} is not an unencrypted private key as `dpfed keys` or ssh-keygen writes them"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _not_elliptic(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise DpfedError(f"{path} can be read by others on this machine: chmod 600 {path}")


def _not_elliptic(path: Path) -> DpfedError:
    return DpfedError(
        f"{path} is not an elliptic-curve key: make one with `dpfed keys` or ssh-keygen -t ecdsa"
    )


def check_names(clients: Sequence[str]) -> None:
    if not clients:
        raise DpfedError("there are no clients: name them, --clients clinic-a,clinic-b")
    for name in clients:
        if not NAME.fullmatch(name) or name in RESERVED:
            raise DpfedError(
                f"{name!r} cannot name a client here: up to 64 letters, digits, dots, dashes"
            )
    twice = next((name for name in clients if list(clients).count(name) > 1), None)
    if twice is not None:
        raise DpfedError(f"two clients are called {twice!r}: give each its own name")


def check_host(host: str) -> None:
    if not host or len(host) > 253 or not re.fullmatch(r"[A-Za-z0-9.:_-]+", host):
        raise DpfedError(
            f"{host!r} is not a host name or address: "
            "--server takes the one that clients connect to"
        )
    if host.count(":") == 1:
        raise DpfedError(f"{host!r} has a port: a certificate is for a host, leave the port out")


def _refuse_used(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DpfedError(
            f"{folder} is not empty, and keys are never overwritten: choose another folder"
        )


def _authority(days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dpfed trial authority")])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _server(
    authority: ec.EllipticCurvePrivateKey, issuer: x509.Certificate, host: str, days: int
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new private key and its certificate for `host`, signed by the authority.

    The certificate is also valid for this machine's own names (`LOCAL`).
    """
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    hosts = [_general_name(each) for each in dict.fromkeys((host, *LOCAL))]
    from_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = (
        _builder(name, issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(from_issuer, critical=False)
        .sign(authority, hashes.SHA256())
    )
    return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Let the certificate begin a day early. Otherwise clients whose clocks are behind would
        # refuse it.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _client_pair(name: str) -> tuple[bytes, bytes]:
    """Return a new private key and its public key for a client, both in OpenSSH's format."""
    key = ec.generate_private_key(CURVE)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, public + f" {name}\n".encode()


def _write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Write files into `folder` that only their owner can read, and return their paths.

    Raise DpfedError if a file exists already.
    """
    try:
        for name, data in files.items():
            make_private_folder((folder / name).parent)
            with open_private(folder / name, "xb") as file:
                file.write(data)
    except OSError as error:
        raise DpfedError(f"keys cannot be written to {folder}: {error.strerror}") from None
    return [folder / name for name in files]

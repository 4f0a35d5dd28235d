"""Keys: accepted by OpenSSL and Flower, private to their owner, and never overwritten."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from dpfed.errors import DpfedError
from dpfed.federation.keys import check_private, make_all, make_client, public_key

FILES = ["README", "ca.crt", "client.key", "client.toml"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys") / "keys"
    make_all(made, "hub.example.org", ["clinic-a", "clinic-b"])
    return made


def handshake(folder: Path, host: str, authority: Path) -> None:
    """Make a TLS connection to a server that the client expects to be `host`."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(authority))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    one, two = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(two, server_side=True).recv(1)
        except OSError:
            two.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(one, server_hostname=host).send(b"x")
    finally:
        one.close()
        thread.join()
        two.close()


@pytest.mark.parametrize("host", ["hub.example.org", "localhost", "127.0.0.1"])
def test_the_server_is_taken_for_its_host_and_for_this_machine(folder: Path, host: str) -> None:
    handshake(folder, host, folder / "clinic-a" / "ca.crt")


def test_another_host_or_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, "other.example.org", folder / "ca.crt")
    make_all(tmp_path / "other", "hub.example.org", ["x"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, "hub.example.org", tmp_path / "other" / "ca.crt")


def test_each_client_has_its_own_pair_and_only_its_own(folder: Path) -> None:
    for name in ("clinic-a", "clinic-b"):
        assert sorted(path.name for path in (folder / name).iterdir()) == FILES
        private = load_ssh_private_key((folder / name / "client.key").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        own = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        assert public_key(folder / "clients" / f"{name}.pub") == own
        check_private(folder / name / "client.key")
    assert public_key(folder / "clients" / "clinic-a.pub") != public_key(
        folder / "clients" / "clinic-b.pub"
    )


def test_files_are_their_owners_alone(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 15
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_nothing_is_overwritten(folder: Path) -> None:
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(DpfedError, match="never overwritten"):
        make_all(folder, "hub.example.org", ["clinic-a"])
    with pytest.raises(DpfedError, match="never overwritten"):
        make_client(folder, "clinic-a")
    assert (folder / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    ("host", "clients", "sentence"),
    [
        ("hub", [], "there are no clients"),
        ("hub", ["a/b"], "cannot name a client"),
        ("hub", [".."], "cannot name a client"),
        ("hub", ["clients"], "cannot name a client"),
        ("hub", ["a", "b", "a"], "two clients are called 'a'"),
        ("hub:8000", ["a"], "has a port"),
        ("https://hub", ["a"], "not a host name"),
    ],
)
def test_mistakes_leave_nothing_behind(
    host: str, clients: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DpfedError, match=sentence):
        make_all(tmp_path / "keys", host, clients)
    assert not (tmp_path / "keys").exists()


def test_a_client_makes_its_own_pair(tmp_path: Path) -> None:
    assert [path.name for path in make_client(tmp_path / "own", "clinic-a")] == [
        "client.key",
        "clinic-a.pub",
    ]
    check_private(tmp_path / "own" / "client.key")
    assert public_key(tmp_path / "own" / "clinic-a.pub").startswith(b"-----BEGIN PUBLIC KEY")


def test_keys_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "k"
    with pytest.raises(DpfedError, match="cannot be read"):
        public_key(path)
    path.write_text("ssh-ed25519 nonsense")
    with pytest.raises(DpfedError, match="not a public key"):
        public_key(path)
    with pytest.raises(DpfedError, match="not an unencrypted private key"):
        check_private(path)
    make_client(tmp_path / "own", "a")
    key = tmp_path / "own" / "client.key"
    key.chmod(0o644)
    with pytest.raises(DpfedError, match="can be read by others"):
        check_private(key)

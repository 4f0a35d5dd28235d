"""Links: insecure addresses, keys and certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfed.errors import DpfedError
from dpfed.federation import keys
from dpfed.federation.client_config import LinkSection
from dpfed.federation.links import (
    Address,
    address_of,
    check_link,
    client_keys,
    refuse_insecure,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("[::1]:9", Address("::1", 9)),
        ("hub.example.org:443", Address("hub.example.org", 443)),
    ],
)
def test_addresses(text: str, found: Address) -> None:
    assert address_of(text) == found
    assert str(found) == text


@pytest.mark.parametrize(
    "text", ["", "hub", ":80", "hub:", "hub:0", "hub:70000", "http://hub:80", "hub:8o"]
)
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(DpfedError, match="host:port"):
        address_of(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_insecure_is_for_this_machine(text: str) -> None:
    refuse_insecure(address_of(text))


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "hub.example.org:1", "localhost.evil.org:1"]
)
def test_and_for_no_other(text: str) -> None:
    with pytest.raises(DpfedError, match="--insecure is for tests"):
        refuse_insecure(address_of(text))


def test_tls_and_a_key_are_needed_unless_insecure(tmp_path: Path) -> None:
    keys.make_all(tmp_path / "keys", "127.0.0.1", ["clinic-a"])
    ca = str(tmp_path / "keys" / "clinic-a" / "ca.crt")
    key = str(tmp_path / "keys" / "clinic-a" / "client.key")
    assert check_link(LinkSection("hub:1", ca, key), insecure=False) == Address("hub", 1)
    assert check_link(LinkSection("127.0.0.1:1"), insecure=True).loopback
    for link, sentence in (
        (LinkSection("hub:1", "", key), "lacks link.ca"),
        (LinkSection("hub:1", ca, ""), "lacks link.key"),
        (LinkSection("hub:1", ca + "x", key), "is not there"),
        (LinkSection("hub:1", ca, ca), "not an unencrypted private key"),
    ):
        with pytest.raises(DpfedError, match=sentence):
            check_link(link, insecure=False)
    with pytest.raises(DpfedError, match="--insecure is for tests"):
        check_link(LinkSection("hub:1", ca, key), insecure=True)


def test_every_client_is_known_by_a_key_of_its_own(tmp_path: Path) -> None:
    keys.make_all(tmp_path / "keys", "127.0.0.1", ["a", "b"])
    assert set(client_keys(tmp_path / "keys", ["a", "b"])) == {"a", "b"}
    with pytest.raises(DpfedError, match=r"c\.pub cannot be read"):
        client_keys(tmp_path / "keys", ["a", "c"])
    both = tmp_path / "keys" / "clients"
    (both / "b.pub").write_bytes((both / "a.pub").read_bytes())
    with pytest.raises(DpfedError, match="same key"):
        client_keys(tmp_path / "keys", ["a", "b"])

"""Links: insecure addresses, keys and certificates, and processes that end with their parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until_ended

from dpfed.errors import DpfedError
from dpfed.federation import keys, links
from dpfed.federation.client_config import LinkSection
from dpfed.federation.links import (
    Address,
    address_of,
    check_link,
    client_keys,
    free_port,
    last_line,
    refuse_insecure,
    refuse_taken,
    secret_file,
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


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(DpfedError, match="nothing can listen on"):
            refuse_taken(Address("127.0.0.1", other.getsockname()[1]))
    refuse_taken(Address("127.0.0.1", free_port()))


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


def test_a_secret_is_its_owners_alone_and_new_each_time(tmp_path: Path) -> None:
    for text in ("one", "two"):
        path = secret_file(tmp_path / "home", text)
        assert path.read_text() == text
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_reason_is_what_the_last_error_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == "it wrote nothing"
    log.write_text(
        "\x1b[92mINFO \x1b[0m:  fine\n"
        "\x1b[91mERROR \x1b[0m:  Exit Code: 600\nno such key\n\nINFO: over\n"
    )
    assert last_line(log) == "ERROR : Exit Code: 600 no such key"
    assert last_line(log, log.stat().st_size) == "it wrote nothing"


CHILD = """
import sys, time
from dpfed.federation.flower.child import end_with
end_with(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_child_does_not_outlive_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until_ended([child], limit=5)


def test_a_port_of_another_user_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = links.Address("127.0.0.1", listener.getsockname()[1])
        assert links.is_own(address)
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert not links.is_own(address)
    # Nothing listens here now.
    assert links.is_own(address)

"""The relay: bytes between two processes of one machine, and the ServerApp behind it."""

from __future__ import annotations

import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfed.errors import StoppedError
from dpfed.federation.flower import relay
from dpfed.federation.flower.header import NONCE
from dpfed.federation.flower.post import LinkDownError, RelayPost, serve_grid


@pytest.fixture
def path() -> Iterator[str]:
    with relay.private_path() as found:
        yield found


def test_the_folder_is_its_owners_alone_and_goes_away() -> None:
    with relay.private_path() as path:
        folder = Path(path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(path) < 100
    assert not folder.exists()


def test_calls_side_by_side_get_their_own_replies(path: str) -> None:
    ended = threading.Event()
    server = threading.Thread(
        target=relay.serve, args=(path, lambda h, d: ({"n": h["n"]}, d[::-1]), ended)
    )
    server.start()
    wrong: list[int] = []

    def ask(n: int) -> None:
        for _ in range(50):
            data = bytes([n]) * (n * 10_000)
            header, back = relay.call(path, {"n": n}, data)
            if (header["n"], back) != (n, data):
                wrong.append(n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    wait_for(path)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    server.join()
    assert not wrong


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"\0" * 5, b"\xff" * 12, b"\x01\0\0\0" + b"\0" * 8 + b"x"])
def test_what_is_no_frame_is_dropped_and_the_next_call_is_answered(path: str, sent: bytes) -> None:
    listener = relay.Listener(path, limit=10)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(path)
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        assert listener.next(5.0) is None
    assert ask_with(listener, b"ten bytes!") == b"ten bytes!"
    with pytest.raises(OSError, match=r"ended|pipe|reset"):
        ask_with(listener, b"eleven bytes")
    listener.close()


def ask_with(listener: relay.Listener, data: bytes) -> bytes:
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(relay.call(listener.path, {}, data)[1])
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    call = listener.next(5.0)
    if call is not None:
        call.answer(lambda header, data: (header, data))
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    reply: bytes = found[0]
    return reply


class FakeGrid:
    """Flower's Grid with one node."""

    def __init__(self) -> None:
        self.down = False

    def get_nodes(self) -> list[Any]:
        if self.down:
            raise ConnectionError("refused")
        return [SimpleNamespace(node_id=2**63 + 1, public_key=b"\xffkey", last_activated_at="t")]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        pytest.importorskip("flwr")
        from dpfed.federation.flower.envelope import envelope

        if ids == ["none"]:
            return []
        metadata = SimpleNamespace(reply_to_message_id=ids[0], src_node_id=2**63 + 1)
        content = envelope({NONCE: "n"}, None if ids == ["empty"] else b"data")
        return [SimpleNamespace(metadata=metadata, has_error=lambda: False, content=content)]


def test_the_server_reaches_flowers_grid_through_the_relay(path: str) -> None:
    grid: Any = FakeGrid()
    app = threading.Thread(target=serve_grid, args=(grid, path))
    app.start()
    post = RelayPost(path)
    post.wait()
    node = post.nodes()[0]
    assert (node.number, node.key, node.since) == (2**63 + 1, b"\xffkey", "t")
    found = post.take("m")
    assert found is not None
    assert (found.node, found.header, found.data) == (2**63 + 1, {NONCE: "n"}, b"data")
    empty = post.take("empty")
    assert empty is not None
    assert empty.data is None
    assert post.take("none") is None
    grid.down = True
    with pytest.raises(LinkDownError, match="refused"):
        post.nodes()
    post.end()
    app.join(10)
    assert not app.is_alive()
    with pytest.raises(StoppedError, match="ServerApp has ended"):
        post.nodes()


def test_waiting_for_the_app_ends_with_flower(path: str) -> None:
    def alive() -> None:
        raise StoppedError("the SuperLink has ended")

    with pytest.raises(StoppedError, match="SuperLink has ended"):
        RelayPost(path, alive).wait()

"""The transport: keys identify clients, and a reply counts for its own node only."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.flower import transport as module
from dpfed.federation.flower.answering import Answerer
from dpfed.federation.flower.header import NAME, NONCE, REFUSED
from dpfed.federation.flower.post import Delivery, LinkDownError, Node
from dpfed.federation.flower.transport import PostTransport
from dpfed.federation.policy import RefusedError

KEYS = {"a": b"key of a", "b": b"key of b"}


@dataclass(frozen=True)
class Letter:
    """A message that was sent to a node."""

    node: int
    kind: str
    nonce: str
    data: bytes | None
    ttl: float


Handler = Callable[[Letter], Delivery | None]


class FakePost:
    """Nodes by number, each with a function that answers its messages."""

    def __init__(self, **nodes: Handler) -> None:
        self.handlers = {100 + i: handler for i, handler in enumerate(nodes.values())}
        self.connected = {
            100 + i: Node(100 + i, KEYS.get(name, b"?"), "1") for i, name in enumerate(nodes)
        }
        self.replies: dict[str, Delivery] = {}
        self.sent: list[Letter] = []
        self.polls = 0
        self.each_poll: Callable[[int], None] = lambda n: None

    def nodes(self) -> list[Node]:
        self.polls += 1
        self.each_poll(self.polls)
        return list(self.connected.values())

    def send(
        self, node: int, kind: str, header: dict[str, str], data: bytes | None, ttl: float
    ) -> str:
        key = f"m{len(self.sent)}"
        letter = Letter(node, kind, header[NONCE], data, ttl)
        self.sent.append(letter)
        reply = self.handlers[node](letter)
        if reply is not None:
            self.replies[key] = reply
        return key

    def take(self, key: str) -> Delivery | None:
        return self.replies.pop(key, None)


def answering(data: bytes) -> Handler:
    return lambda letter: Delivery(letter.node, None, {NONCE: letter.nonce}, data)


def failing(code: int) -> Handler:
    return lambda letter: Delivery(letter.node, error=code)


def silent(letter: Letter) -> None:
    return None


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)


def ask(grid: FakePost, timeout: float = 0.2, **more: Any) -> dict[str, bytes | Exception]:
    transport: Any = PostTransport(grid, KEYS, **more)
    return dict(transport.send_all({"a": b"for a", "b": b"for b"}, timeout))


def test_each_client_gets_its_own_bytes_and_answers_under_its_name() -> None:
    grid = FakePost(b=answering(b"of b"), a=answering(b"of a"))
    assert ask(grid) == {"a": b"of a", "b": b"of b"}
    sent = {letter.node: letter for letter in grid.sent}
    assert sent[100].data == b"for b"
    assert sent[101].data == b"for a"
    assert sent[100].nonce != sent[101].nonce
    assert len(sent[100].nonce) == 64
    assert {letter.ttl for letter in grid.sent} == {0.2}, (
        "nobody is to work for a round that is over"
    )


def test_a_node_with_an_unknown_key_is_never_asked() -> None:
    grid = FakePost(a=answering(b"of a"), stranger=answering(b"of a stranger"))
    assert ask(grid, absent=0.02) == {"a": b"of a"}
    assert [letter.node for letter in grid.sent] == [100]


@pytest.mark.parametrize("forged", ["nonce", "node", "nothing"])
def test_an_answer_of_somebody_else_does_not_count(forged: str) -> None:
    def forger(letter: Letter) -> Delivery:
        nonce = {NONCE: "guessed" if forged == "nonce" else letter.nonce}
        node = 100 if forged == "node" else letter.node
        return Delivery(node, None, {} if forged == "nothing" else nonce, b"forged")

    found = ask(FakePost(a=answering(b"of a"), b=forger))
    assert found["a"] == b"of a"
    assert isinstance(found["b"], DpfedError)
    assert "does not come from the node that was asked" in str(found["b"])


def test_who_is_silent_is_left_out_when_the_time_is_over() -> None:
    assert ask(FakePost(a=answering(b"of a"), b=silent), 0.05) == {"a": b"of a"}


def test_who_is_not_connected_is_not_waited_for_as_long() -> None:
    grid = FakePost(a=answering(b"of a"), b=silent)
    del grid.connected[101]
    assert ask(grid, timeout=60.0, absent=0.02) == {"a": b"of a"}


def test_who_stays_away_holds_up_one_round_and_not_every_one() -> None:
    grid = FakePost(a=answering(b"of a"), b=answering(b"of b"))
    away = grid.connected.pop(101)
    transport: Any = PostTransport(grid, KEYS, absent=0.05)
    requests = {"a": b"for a", "b": b"for b"}
    assert dict(transport.send_all(requests, 60.0)) == {"a": b"of a"}
    first = grid.polls
    grid.polls = 0
    assert dict(transport.send_all(requests, 60.0)) == {"a": b"of a"}
    assert grid.polls == 1 < first
    del grid.connected[100]
    grid.polls = 0
    assert dict(transport.send_all(requests, 60.0)) == {}
    assert grid.polls > 1, "where nobody is there, all are waited for"
    grid.connected[101] = away
    assert dict(transport.send_all({"b": b"for b"}, 60.0)) == {"b": b"of b"}


def test_a_client_that_connects_late_is_asked_then() -> None:
    grid = FakePost(a=answering(b"of a"), b=answering(b"of b"))
    late = grid.connected.pop(101)

    def connect(n: int) -> None:
        if n == 5:
            grid.connected[101] = late

    grid.each_poll = connect
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}


def test_a_client_that_connects_again_is_asked_again_with_the_same_bytes() -> None:
    grid = FakePost(a=answering(b"of a"), b=silent)

    def restart(n: int) -> None:
        if n == 5:
            grid.connected[101] = Node(101, KEYS["b"], "2")
            grid.handlers[101] = answering(b"of b")

    grid.each_poll = restart
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}
    assert [letter.data for letter in grid.sent if letter.node == 101] == [b"for b", b"for b"]


def test_a_request_that_went_away_with_its_node_is_sent_again() -> None:
    grid = FakePost(a=answering(b"of a"), b=failing(5))

    def mend(n: int) -> None:
        if n == 3:
            grid.handlers[101] = answering(b"of b")

    grid.each_poll = mend
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}


def test_an_app_that_never_starts_is_asked_three_times_over_one_connection() -> None:
    grid = FakePost(a=answering(b"of a"), b=failing(1))
    found = ask(grid, 60.0)
    assert isinstance(found["b"], RefusedError)
    assert "its own log says why" in str(found["b"])
    assert [letter.node for letter in grid.sent].count(101) == 3


def test_what_flower_cannot_put_together_is_its_senders_fault_alone() -> None:
    grid = FakePost(a=lambda letter: Delivery(broken=True), b=answering(b"of b"))
    found = ask(grid)
    assert found["b"] == b"of b"
    assert "no message of Flower" in str(found["a"])


def test_a_refusal_is_an_error_with_its_text_cut() -> None:
    def refusing(letter: Letter) -> Delivery:
        return Delivery(letter.node, None, {NONCE: letter.nonce, REFUSED: "no " * 999}, None)

    found = ask(FakePost(a=refusing, b=lambda x: Delivery(x.node, None, {NONCE: x.nonce}, None)))
    assert isinstance(found["a"], RefusedError)
    assert len(str(found["a"])) == 300
    assert "both sides need the same dpfed" in str(found["b"])


def test_who_announces_a_reply_and_does_not_send_it_holds_up_nobody() -> None:
    over = threading.Event()
    grid = FakePost(a=silent, b=answering(b"of b"))
    real = grid.take

    def take(key: str) -> Delivery | None:
        if grid.sent[int(key[1:])].node == 100:
            # Flower waits for hours here.
            over.wait(30)
        return real(key)

    grid.take = take  # type: ignore[method-assign]
    transport: Any = PostTransport(grid, KEYS)
    try:
        assert dict(transport.send_all({"a": b"for a", "b": b"for b"}, 0.7)) == {"b": b"of b"}
    finally:
        over.set()
    assert (transport._pulls._threads, transport._pulls._found) == ({}, {}), (
        "what is late is not kept"
    )


def many(count: int, handler: Handler) -> tuple[FakePost, Any]:
    """Return `count` clients c0, c1, ... that answer with `handler`, and their transport."""
    names = [f"c{i}" for i in range(count)]
    keys = {name: f"key of {name}".encode() for name in names}
    grid = FakePost(**dict.fromkeys(names, handler))
    for number, key in zip(list(grid.connected), keys.values(), strict=True):
        grid.connected[number] = Node(number, key, "1")
    return grid, PostTransport(grid, keys)


def test_few_replies_are_fetched_at_once_and_stalled_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    grid, transport = many(6, answering(b"reply"))
    real = grid.take
    stalled = {"m0", "m1", "m2"}
    busy: list[str] = []
    most = [0]

    def take(key: str) -> Delivery | None:
        busy.append(key)
        most.append(len([other for other in busy if other not in stalled]))
        if key in stalled:
            over.wait(30)
        time.sleep(0.01)
        found = real(key)
        busy.remove(key)
        return found

    grid.take = take  # type: ignore[method-assign]
    monkeypatch.setattr(module, "STALLED_S", 0.1)
    try:
        found = dict(transport.send_all({f"c{i}": b"request" for i in range(6)}, 3.0))
    finally:
        over.set()
    assert found == {f"c{i}": b"reply" for i in range(3, 6)}
    assert max(most) <= module.MAX_PULLS


def test_second_replies_of_the_same_clients_do_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, transport = many(3, answering(b"reply"))
    late = grid.connected.pop(102)
    real = grid.take
    first = {"m0", "m1"}
    again = threading.Event()

    def take(key: str) -> Delivery | None:
        if key in first:
            again.wait(30)
        return real(key)

    def poll(n: int) -> None:
        if n == 2:
            for number in (100, 101):
                grid.connected[number] = replace(grid.connected[number], since="2")
        if n == 4:
            again.set()
            time.sleep(0.05)
            grid.connected[102] = late

    grid.take = take  # type: ignore[method-assign]
    grid.each_poll = poll
    monkeypatch.setattr(module, "STALLED_S", 0.02)
    monkeypatch.setattr(module, "PULL_S", 0.1)
    found = dict(transport.send_all({f"c{i}": b"request" for i in range(3)}, 3.0))
    assert found == {f"c{i}": b"reply" for i in range(3)}


class Counted(bytes):
    """Bytes that count how many of them are in memory."""

    alive = 0

    def __init__(self, *args: Any) -> None:
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


def test_memory_holds_few_replies_whatever_the_number_of_clients() -> None:
    grid, transport = many(12, answering(b"reply"))
    real = grid.take

    def take(key: str) -> Delivery | None:
        found = real(key)
        assert found is not None
        return replace(found, data=Counted(b"reply"))

    grid.take = take  # type: ignore[method-assign]
    most = 0
    gc.disable()
    try:
        count = 0
        for _, data in transport.send_all({f"c{i}": b"request" for i in range(12)}, 5.0):
            # Give the threads time to fetch more than they may.
            time.sleep(0.02)
            most = max(most, Counted.alive)
            count += 1
            del data
    finally:
        gc.enable()
    assert count == 12
    assert most <= module.MAX_PULLS + 1
    assert Counted.alive == 0


def test_a_message_that_the_link_does_not_take_is_sent_again() -> None:
    grid = FakePost(a=answering(b"of a"), b=answering(b"of b"))
    real = grid.send
    refused: list[int] = []

    def send(node: int, *rest: Any) -> str:
        if node == 101 and len(refused) < 3:
            refused.append(1)
            return ""
        return real(node, *rest)

    grid.send = send  # type: ignore[method-assign,assignment]
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}
    assert len(refused) == 3


def test_late_answers_to_an_earlier_call_are_not_taken_for_this_one() -> None:
    grid = FakePost(a=answering(b"of a"), b=silent)
    transport: Any = PostTransport(grid, KEYS)
    assert dict(transport.send_all({"b": b"round 1"}, 0.02)) == {}
    old = grid.sent[0]
    grid.replies["m0"] = Delivery(101, None, {NONCE: old.nonce}, b"late")
    assert dict(transport.send_all({"b": b"round 2"}, 0.02)) == {}


def test_the_link_may_be_away_for_a_moment_but_not_for_good() -> None:
    grid = FakePost(a=answering(b"of a"), b=answering(b"of b"))

    def fall(n: int) -> None:
        if n < 4:
            raise LinkDownError("down")

    grid.each_poll = fall
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}

    def gone() -> None:
        raise StoppedError("the SuperLink has ended")

    grid.polls = 0
    with pytest.raises(StoppedError, match="has ended"):
        ask(grid, 5.0, alive=gone)


def test_waiting_can_be_stopped() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(FakePost(a=silent, b=silent), 60.0, stop=stop)


def test_waiting_for_clients_says_how_many_are_there() -> None:
    grid = FakePost(a=silent, b=silent)
    said: list[str] = []
    late = grid.connected.pop(101)
    transport: Any = PostTransport(grid, KEYS)
    transport.wait_for(["a", "b"], 1, 5.0, said.append)
    assert said == []
    with pytest.raises(StoppedError, match="only 1 of 2"):
        transport.wait_for(["a", "b"], 2, 0.01, said.append)
    assert said == ["waiting for clients: 1 of 2 are connected, 2 are needed"]
    grid.connected[101] = late
    transport.wait_for(["a", "b"], 2, 5.0, said.append)


def client_named(name: str, greets: bool) -> Handler:
    answerer = Answerer(lambda data: data[::-1], name, lambda line: None, greets)

    def handler(letter: Letter) -> Delivery:
        request = {"kind": letter.kind, "header": {NONCE: letter.nonce}}
        found, data = answerer(request, letter.data or b"")
        return Delivery(letter.node, None, found["header"], data if found["has_data"] else None)

    return handler


def test_without_keys_nodes_say_their_names() -> None:
    post = FakePost(x=client_named("ada", True), y=client_named("bob", True))
    transport = PostTransport(post, None)
    found = dict(transport.send_all({"bob": b"123", "ada": b"456"}, 5.0))
    assert found == {"bob": b"321", "ada": b"654"}


def test_with_keys_nodes_are_not_asked_for_their_names_and_do_not_say_them() -> None:
    post = FakePost(a=client_named("b", False), b=client_named("a", False))
    assert ask(post) == {"a": b"a rof", "b": b"b rof"}
    assert {letter.kind for letter in post.sent} == {"train"}
    assert NAME not in client_named("a", False)(Letter(1, "query", "n", None, 1.0)).header  # type: ignore[union-attr]

"""The transport over a Grid: keys identify clients, and a reply counts for its own node only."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.flower import transport as module
from dpfed.federation.flower.apps import client_app
from dpfed.federation.flower.envelope import HEADER, NONCE, envelope, header_value, payload_of
from dpfed.federation.flower.transport import GridTransport
from dpfed.federation.policy import RefusedError

KEYS = {"a": b"key of a", "b": b"key of b"}
Handler = Callable[[Message], Message | None]


class FakeGrid:
    """Nodes by number, each with a function that answers its messages."""

    def __init__(self, **nodes: Handler) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.handlers = {100 + i: handler for i, handler in enumerate(nodes.values())}
        self.nodes = {
            100 + i: SimpleNamespace(
                node_id=100 + i, public_key=KEYS.get(name, b"?"), last_activated_at="1"
            )
            for i, name in enumerate(nodes)
        }
        self.replies: dict[str, Message] = {}
        self.sent: list[Message] = []
        self.polls = 0
        self.each_poll: Callable[[int], None] = lambda n: None

    def get_nodes(self) -> list[Any]:
        self.polls += 1
        self.each_poll(self.polls)
        return list(self.nodes.values())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"m{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.sent.append(message)
            reply = self.handlers[message.metadata.dst_node_id](message)
            if reply is not None:
                self.replies[ids[-1]] = reply
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        found = [self.replies.pop(key) for key in ids if key in self.replies]
        if any(isinstance(reply, Exception) for reply in found):
            raise next(reply for reply in found if isinstance(reply, Exception))
        return found


def answering(data: bytes) -> Handler:
    return lambda message: Message(
        envelope(data, header_value(message.content, NONCE)), reply_to=message
    )


def failing(code: int, text: str = "row 17 of patients.csv") -> Handler:
    return lambda message: Message(Error(code, text), reply_to=message)


def silent(message: Message) -> None:
    return None


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)


def ask(grid: FakeGrid, timeout: float = 0.2, **more: Any) -> dict[str, bytes | Exception]:
    transport: Any = GridTransport(grid, KEYS, **more)  # type: ignore[arg-type]
    return dict(transport.send_all({"a": b"for a", "b": b"for b"}, timeout))


def test_each_client_gets_its_own_bytes_and_answers_under_its_name() -> None:
    grid = FakeGrid(b=answering(b"of b"), a=answering(b"of a"))
    assert ask(grid) == {"a": b"of a", "b": b"of b"}
    sent = {message.metadata.dst_node_id: message for message in grid.sent}
    assert sent[100].content["dpfed.parcel"]["data"].data == b"for b"
    assert sent[101].content["dpfed.parcel"]["data"].data == b"for a"
    assert header_value(sent[100].content, NONCE) != header_value(sent[101].content, NONCE)
    assert len(header_value(sent[100].content, NONCE)) == 64
    assert {message.metadata.ttl for message in grid.sent} == {0.2}, (
        "nobody is to work for a round that is over"
    )


def test_a_node_with_an_unknown_key_is_never_asked() -> None:
    grid = FakeGrid(a=answering(b"of a"), stranger=answering(b"of a stranger"))
    assert ask(grid, absent=0.02) == {"a": b"of a"}
    assert [message.metadata.dst_node_id for message in grid.sent] == [100]


@pytest.mark.parametrize("forged", ["nonce", "node", "nothing"])
def test_an_answer_of_somebody_else_does_not_count(forged: str) -> None:
    def forger(message: Message) -> Message:
        content = envelope(
            b"forged", header_value(message.content, NONCE) if forged != "nonce" else "guessed"
        )
        if forged == "nothing":
            content = RecordDict({HEADER: ConfigRecord({NONCE: 3})})
        reply = Message(content, reply_to=message)
        if forged == "node":
            reply.metadata.__dict__["_src_node_id"] = 100
        return reply

    found = ask(FakeGrid(a=answering(b"of a"), b=forger))
    assert found["a"] == b"of a"
    assert isinstance(found["b"], DpfedError)
    assert "does not come from the node that was asked" in str(found["b"])


def test_who_is_silent_is_left_out_when_the_time_is_over() -> None:
    assert ask(FakeGrid(a=answering(b"of a"), b=silent), 0.05) == {"a": b"of a"}


def test_who_is_not_connected_is_not_waited_for_as_long() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=silent)
    del grid.nodes[101]
    assert ask(grid, timeout=60.0, absent=0.02) == {"a": b"of a"}


def test_who_stays_away_holds_up_one_round_and_not_every_one() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=answering(b"of b"))
    away = grid.nodes.pop(101)
    transport: Any = GridTransport(grid, KEYS, absent=0.05)  # type: ignore[arg-type]
    requests = {"a": b"for a", "b": b"for b"}
    assert dict(transport.send_all(requests, 60.0)) == {"a": b"of a"}
    first = grid.polls
    grid.polls = 0
    assert dict(transport.send_all(requests, 60.0)) == {"a": b"of a"}
    assert grid.polls == 1 < first
    del grid.nodes[100]
    grid.polls = 0
    assert dict(transport.send_all(requests, 60.0)) == {}
    assert grid.polls > 1, "where nobody is there, all are waited for"
    grid.nodes[101] = away
    assert dict(transport.send_all({"b": b"for b"}, 60.0)) == {"b": b"of b"}


def test_a_client_that_connects_late_is_asked_then() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=answering(b"of b"))
    late = grid.nodes.pop(101)

    def connect(n: int) -> None:
        if n == 5:
            grid.nodes[101] = late

    grid.each_poll = connect
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}


def test_a_client_that_connects_again_is_asked_again_with_the_same_bytes() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=silent)

    def restart(n: int) -> None:
        if n == 5:
            grid.nodes[101].last_activated_at = "2"
            grid.handlers[101] = answering(b"of b")

    grid.each_poll = restart
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}
    both = [message for message in grid.sent if message.metadata.dst_node_id == 101]
    assert [message.content["dpfed.parcel"]["data"].data for message in both] == [
        b"for b",
        b"for b",
    ]


def test_a_request_that_went_away_with_its_node_is_sent_again() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=failing(ErrorCode.NODE_UNAVAILABLE))

    def mend(n: int) -> None:
        if n == 3:
            grid.handlers[101] = answering(b"of b")

    grid.each_poll = mend
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}


def test_what_flower_tells_of_an_exception_goes_no_further() -> None:
    found = ask(FakeGrid(a=answering(b"of a"), b=failing(ErrorCode.CLIENT_APP_RAISED_EXCEPTION)))
    assert isinstance(found["b"], RefusedError)
    assert "patients" not in str(found["b"])


def test_what_flower_cannot_put_together_is_its_senders_fault_alone() -> None:
    def garbage(message: Message) -> Any:
        return KeyError("no such object")

    found = ask(FakeGrid(a=garbage, b=answering(b"of b")))
    assert found["b"] == b"of b"
    assert "no message of Flower" in str(found["a"])


def test_who_announces_a_reply_and_does_not_send_it_holds_up_nobody() -> None:
    over = threading.Event()
    grid = FakeGrid(a=silent, b=answering(b"of b"))
    real = grid.pull_messages

    def pull(ids: list[str]) -> list[Message]:
        node = next(
            message for i, message in enumerate(grid.sent) if f"m{i}" == ids[0]
        ).metadata.dst_node_id
        if node == 100:
            # Flower waits for hours here.
            over.wait(30)
        return real(ids)

    grid.pull_messages = pull  # type: ignore[method-assign,assignment]
    transport: Any = GridTransport(grid, KEYS)  # type: ignore[arg-type]
    try:
        assert dict(transport.send_all({"a": b"for a", "b": b"for b"}, 0.7)) == {"b": b"of b"}
    finally:
        over.set()
    assert (transport._pulls._threads, transport._pulls._found) == ({}, {}), (
        "what is late is not kept"
    )


def test_few_replies_are_fetched_at_once_and_stalled_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    names = [f"c{i}" for i in range(6)]
    keys = {name: f"key of {name}".encode() for name in names}
    grid = FakeGrid(**dict.fromkeys(names, answering(b"reply")))
    for node, key in zip(grid.nodes.values(), keys.values(), strict=True):
        node.public_key = key
    real = grid.pull_messages
    stalled = {"m0", "m1", "m2"}
    busy: list[str] = []
    most = [0]

    def pull(ids: list[str]) -> list[Message]:
        busy.append(ids[0])
        most.append(len([key for key in busy if key not in stalled]))
        if ids[0] in stalled:
            over.wait(30)
        found = real(ids)
        busy.remove(ids[0])
        return found

    grid.pull_messages = pull  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(module, "STALLED_S", 0.1)
    transport: Any = GridTransport(grid, keys)  # type: ignore[arg-type]
    try:
        found = dict(transport.send_all(dict.fromkeys(names, b"request"), 3.0))
    finally:
        over.set()
    assert found == dict.fromkeys(names[3:], b"reply")
    assert max(most) <= module.MAX_PULLS


def test_messages_are_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        message = Message(envelope(b"data", "n"), 100, "train")
        array = weakref.ref(message.content["dpfed.parcel"]["data"])
        assert payload_of(message.content) == b"data"
        assert header_value(message.content, NONCE) == "n"
        del message
        assert array() is None
    finally:
        gc.enable()


def test_a_message_that_the_link_does_not_take_is_sent_again() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=answering(b"of b"))
    real = grid.push_messages
    refused: list[int] = []

    def push(messages: list[Message]) -> list[str]:
        if messages[0].metadata.dst_node_id == 101 and len(refused) < 3:
            refused.append(1)
            return [""]
        return real(messages)

    grid.push_messages = push  # type: ignore[method-assign,assignment]
    assert ask(grid, 5.0) == {"a": b"of a", "b": b"of b"}
    assert len(refused) == 3


def test_late_answers_to_an_earlier_call_are_not_taken_for_this_one() -> None:
    grid = FakeGrid(a=answering(b"of a"), b=silent)
    transport: Any = GridTransport(grid, KEYS)  # type: ignore[arg-type]
    assert dict(transport.send_all({"b": b"round 1"}, 0.02)) == {}
    old = grid.sent[0]
    grid.replies["m0"] = Message(envelope(b"late", header_value(old.content, NONCE)), reply_to=old)
    assert dict(transport.send_all({"b": b"round 2"}, 0.02)) == {}


def test_the_link_may_be_away_for_a_moment_but_not_for_good() -> None:
    import httpx

    grid = FakeGrid(a=answering(b"of a"), b=answering(b"of b"))

    def fall(n: int) -> None:
        if n < 4:
            raise httpx.ConnectError("down")

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
        ask(FakeGrid(a=silent, b=silent), 60.0, stop=stop)


def test_waiting_for_clients_says_how_many_are_there() -> None:
    grid = FakeGrid(a=silent, b=silent)
    said: list[str] = []
    late = grid.nodes.pop(101)
    transport: Any = GridTransport(grid, KEYS)  # type: ignore[arg-type]
    transport.wait_for(["a", "b"], 1, 5.0, said.append)
    assert said == []
    with pytest.raises(StoppedError, match="only 1 of 2"):
        transport.wait_for(["a", "b"], 2, 0.01, said.append)
    assert said == ["waiting for clients: 1 of 2 are connected, 2 are needed"]
    grid.nodes[101] = late
    transport.wait_for(["a", "b"], 2, 5.0, said.append)


def app_as(app: Any) -> Handler:
    return lambda message: app(message=message, context=SimpleNamespace())


def test_without_keys_nodes_say_their_names() -> None:
    log: list[str] = []
    apps = {
        name: app_as(client_app(lambda data: data[::-1], name, log.append, greets=True))
        for name in ("ada", "bob")
    }
    transport: Any = GridTransport(FakeGrid(**apps), None)  # type: ignore[arg-type]
    assert dict(transport.send_all({"bob": b"123", "ada": b"456"}, 5.0)) == {
        "bob": b"321",
        "ada": b"654",
    }
    assert len(log) == 2


def test_with_keys_nodes_are_not_asked_for_their_names_and_do_not_say_them() -> None:
    grid = FakeGrid(
        a=app_as(client_app(bytes, "b", print)), b=app_as(client_app(bytes, "a", print))
    )
    assert ask(grid) == {"a": b"for a", "b": b"for b"}
    with pytest.raises(ValueError, match="No query function"):
        client_app(bytes, "a", print)(Message(envelope(b"", "t"), 1, "query"), SimpleNamespace())  # type: ignore[arg-type]

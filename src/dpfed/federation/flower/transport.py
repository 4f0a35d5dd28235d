"""`Transport` over Flower's Grid: clients are identified by keys, replies by node and nonce."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.flower.envelope import (
    NAME,
    NONCE,
    envelope,
    greeting,
    header_value,
    payload_of,
)
from dpfed.federation.messages import MessageError
from dpfed.federation.policy import FAILURE, RefusedError

POLL_S = 0.2
# Longest wait for replies in one poll.
PULL_S = 0.5
GREETING_TIMEOUT_S = 60.0
# Errors of the SuperLink itself: a node or its message is not available.
UNAVAILABLE = (
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)


@dataclass(frozen=True)
class Connection:
    """A client's node and the time at which it connected.

    A new connection does not know the messages of an earlier one.
    """

    node: int
    since: str


@dataclass(frozen=True)
class Sent:
    """A message under way: the client's name, its node and the message's nonce."""

    name: str
    node: int
    nonce: str


@dataclass
class Exchange:
    """The requests of one `send_all`, with the replies so far."""

    requests: Mapping[str, bytes]
    timeout: float
    replies: dict[str, bytes | Exception] = field(default_factory=dict)
    # The connection that got the request, by name.
    connections: dict[str, Connection] = field(default_factory=dict)
    # Messages under way, by Flower's message id.
    sent: dict[str, Sent] = field(default_factory=dict)

    @property
    def missing(self) -> set[str]:
        return self.requests.keys() - self.replies.keys()


class Pulls:
    """Looks for replies to several messages, each in its own thread.

    Flower waits inside a call until all pieces of a reply are there. With one call for all, a
    client that announces pieces and sends none would block the others. Pieces that do not fit
    together would lose the replies of the others too.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._threads: dict[str, threading.Thread] = {}
        self._found: dict[str, list[Message] | Exception] = {}

    def of(self, keys: Iterable[str]) -> list[tuple[str, list[Message] | Exception]]:
        """Return the results so far, after a wait of at most `PULL_S`."""
        wanted = list(keys)
        end = time.monotonic() + PULL_S
        for key in wanted:
            if key not in self._threads:
                self._threads[key] = threading.Thread(target=self._look, args=(key,), daemon=True)
                self._threads[key].start()
        for key in wanted:
            self._threads[key].join(max(0.0, end - time.monotonic()))
        done = [key for key in wanted if not self._threads[key].is_alive()]
        for key in done:
            del self._threads[key]
        return [(key, self._found.pop(key)) for key in done if key in self._found]

    def forget(self, keys: Iterable[str]) -> None:
        """Discard replies to these messages that arrive later."""
        for key in keys:
            self._threads.pop(key, None)
            self._found.pop(key, None)

    def _look(self, key: str) -> None:
        found: list[Message] | Exception
        try:
            found = list(self._grid.pull_messages([key]))
        except Exception as error:
            found = error
        if key in self._threads:
            self._found[key] = found


class GridTransport:
    """Carries requests to clients and their replies back.

    keys    name -> public key (PEM); None, for tests on one machine: nodes tell their names
    absent  seconds to wait for missing clients while none of them is connected
    stop    called while waiting; may raise
    alive   called when the SuperLink does not reply; raises if it has ended
    kind    the function of the ClientApp that answers
    """

    def __init__(
        self,
        grid: Grid,
        keys: Mapping[str, bytes] | None,
        absent: float = 30.0,
        stop: Callable[[], None] = lambda: None,
        alive: Callable[[], None] = lambda: None,
        kind: str = "train",
    ) -> None:
        self._grid = grid
        self._absent = absent
        self._stop = stop
        self._alive = alive
        self._kind = kind
        self._pulls = Pulls(grid)
        self._names = None if keys is None else {key: name for name, key in keys.items()}
        # Greetings under way, by message id, and the names in their replies, by node.
        self._greetings: dict[str, Sent] = {}
        self._greeted_names: dict[int, str] = {}
        # Clients that never connected in the last exchange; they do not delay the next one.
        self._gone: set[str] = set()

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> dict[str, bytes | Exception]:
        """Send requests and return the replies that arrive in time.

        A client that connects again gets its request again. Replies to earlier calls are ignored.
        """
        exchange = Exchange(requests, timeout)
        end = time.monotonic() + timeout
        absent_end = time.monotonic() + self._absent
        while time.monotonic() < min(end, absent_end):
            self._stop()
            connected = self._step(exchange)
            present = exchange.missing & connected
            # Without any reply, wait for all clients, also for those that are gone.
            awaited = present or not exchange.replies or exchange.missing - self._gone
            if not exchange.missing or not awaited:
                break
            time.sleep(POLL_S)
            if present:
                absent_end = time.monotonic() + self._absent
        self._gone = exchange.missing - exchange.connections.keys()
        self._pulls.forget(exchange.sent)
        return exchange.replies

    def _step(self, exchange: Exchange) -> set[str]:
        """Send requests on new connections and collect replies; return the connected clients."""
        try:
            connected = self.connected()
            for name in exchange.missing & connected.keys():
                if exchange.connections.get(name) != connected[name]:
                    self._send(exchange, name, connected[name])
            self._collect(exchange)
        except httpx.HTTPError:
            self._alive()
            return set()
        return set(connected)

    def wait_for(
        self, names: Iterable[str], enough: int, limit: float, say: Callable[[str], None]
    ) -> None:
        """Wait until `enough` of these clients are connected, for at most `limit` seconds."""
        wanted = set(names)
        end = time.monotonic() + limit
        last_count = -1
        while True:
            self._stop()
            try:
                count = len(wanted & self.connected().keys())
            except httpx.HTTPError:
                self._alive()
                count = 0
            if count >= enough:
                return
            if count != last_count:
                say(
                    f"waiting for clients: {count} of {len(wanted)} are connected, "
                    f"{enough} are needed"
                )
                last_count = count
            if time.monotonic() > end:
                raise StoppedError(
                    f"only {count} of {enough} clients that are needed "
                    f"have connected in {limit:g} seconds"
                )
            time.sleep(POLL_S)

    def connected(self) -> dict[str, Connection]:
        """Return the newest connection of each connected client."""
        found: dict[str, Connection] = {}
        for node in self._grid.get_nodes():
            name = self._name_of(node)
            connection = Connection(int(node.node_id), str(node.last_activated_at))
            if name is not None and (name not in found or found[name].since < connection.since):
                found[name] = connection
        if self._names is None:
            self._read_greetings()
        return found

    def _name_of(self, node: Any) -> str | None:
        if self._names is not None:
            return self._names.get(bytes(node.public_key))
        number = int(node.node_id)
        greeted = {sent.node for sent in self._greetings.values()} | self._greeted_names.keys()
        if number not in greeted:
            sent = Sent("", number, secrets.token_hex(32))
            self._greetings |= self._push(sent, "query", greeting(sent.nonce), GREETING_TIMEOUT_S)
        return self._greeted_names.get(number)

    def _read_greetings(self) -> None:
        for key, reply in self._pull(self._greetings):
            sent = self._greetings.pop(key)
            if reply is None or reply.has_error() or not _has_nonce(reply, sent):
                continue
            name = header_value(reply.content, NAME)
            if name:
                self._greeted_names[sent.node] = name

    def _send(self, exchange: Exchange, name: str, connection: Connection) -> None:
        sent = Sent(name, connection.node, secrets.token_hex(32))
        content = envelope(exchange.requests[name], sent.nonce)
        pushed = self._push(sent, self._kind, content, exchange.timeout)
        exchange.sent |= pushed
        if pushed:
            exchange.connections[name] = connection

    def _push(self, sent: Sent, kind: str, content: Any, timeout: float) -> dict[str, Sent]:
        """Send one message. Flower drops it after `timeout`: no client works on an old round."""
        message = Message(content, sent.node, kind, ttl=timeout)
        return {str(key): sent for key in self._grid.push_messages([message]) if key}

    def _pull(self, keys: Iterable[str]) -> list[tuple[str, Message | None]]:
        """Return replies by message id, with None for one that Flower cannot assemble."""
        found: list[tuple[str, Message | None]] = []
        for key, replies in self._pulls.of(keys):
            if isinstance(replies, httpx.HTTPError):
                raise replies
            if isinstance(replies, Exception):
                found.append((key, None))
            else:
                own = [r for r in replies if r.metadata.reply_to_message_id == key]
                found += [(key, reply) for reply in own]
        return found

    def _collect(self, exchange: Exchange) -> None:
        missing = exchange.missing
        for key, reply in self._pull([k for k, s in exchange.sent.items() if s.name in missing]):
            sent = exchange.sent.pop(key)
            if reply is None:
                error = MessageError("what it sent is no message of Flower's")
                exchange.replies[sent.name] = error
            elif not reply.has_error():
                exchange.replies[sent.name] = _checked_payload(reply, sent)
            elif reply.error.code in UNAVAILABLE:
                # The client disconnected with the request. It gets it again when it is back.
                exchange.connections.pop(sent.name, None)
            else:
                # Flower's text could contain a record, so it goes no further.
                exchange.replies[sent.name] = RefusedError(FAILURE)


def _checked_payload(reply: Message, sent: Sent) -> bytes | Exception:
    try:
        if reply.metadata.src_node_id != sent.node or not _has_nonce(reply, sent):
            raise MessageError("the answer does not come from the node that was asked")
        return payload_of(reply.content)
    except DpfedError as error:
        return error


def _has_nonce(reply: Message, sent: Sent) -> bool:
    return hmac.compare_digest(header_value(reply.content, NONCE).encode(), sent.nonce.encode())

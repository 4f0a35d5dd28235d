"""Send requests to clients through Flower, and collect their replies.

A client is identified by its public key. A reply is accepted only if it comes from the node
(Flower's process at a client) that got the request, and if it contains the request's nonce.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dpfed.errors import StoppedError
from dpfed.federation.flower.header import MAX_TEXT, NAME, NONCE, REFUSED
from dpfed.federation.flower.post import Delivery, LinkDownError, Node, Post
from dpfed.federation.messages import MessageError
from dpfed.federation.policy import FAILURE, RefusedError

# Type of all messages. Flower selects the answering function of the client's app by the type.
TRAIN = "train"
POLL_S = 0.2
# Longest time in seconds that one call of `Pulls.of` waits for replies.
PULL_S = 0.5
# Largest number of replies that are fetched at the same time, so that memory use does not grow with
# the number of clients.
MAX_PULLS = 2
# A reply that is incomplete after this many seconds no longer counts towards MAX_PULLS. Otherwise,
# slow clients could block the replies of all others.
STALLED_S = 5.0
GREETING_TIMEOUT_S = 60.0
# A request is sent again if Flower reports that the client disconnected or that its app did not
# start. It is sent at most this many times over one connection.
MOST_SENDS = 3


@dataclass(frozen=True)
class Connection:
    """The connection of a client: the number of its node in Flower, and the time it connected.

    A client that connects again has lost the requests of its earlier connection, so the server must
    send them again.
    """

    node: int
    since: str


@dataclass(frozen=True)
class Sent:
    """A message that was sent and waits for its reply.

    name   name of the client
    node   number of the client's node in Flower
    nonce  secret random text, which the reply must contain
    """

    name: str
    node: int
    nonce: str


@dataclass
class Exchange:
    """The state of one call of `send_all`: its requests, and the clients that have replied."""

    requests: Mapping[str, bytes]
    timeout: float
    # Names of the clients whose replies have arrived.
    answered: set[str] = field(default_factory=set)
    # The connection over which each client got its request, by client name.
    connections: dict[str, Connection] = field(default_factory=dict)
    # Messages that wait for their replies, by Flower's message id.
    sent: dict[str, Sent] = field(default_factory=dict)
    # How often a request was sent over a connection.
    sends: Counter[Connection] = field(default_factory=Counter)

    @property
    def missing(self) -> set[str]:
        return self.requests.keys() - self.answered


class Pulls:
    """Fetches (pulls) the replies to several messages, each in a thread of its own.

    Flower splits a large reply into pieces, and the call that fetches replies blocks until all
    pieces have arrived. If one call fetched all replies, a client that never sends a piece would
    block all other replies. A client that sends a damaged piece would make the call fail for all
    replies.

    At most MAX_PULLS threads work at once, so that memory does not hold all replies together.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._threads: dict[str, threading.Thread] = {}
        self._found: dict[str, Delivery | Exception | None] = {}
        # Time at which the last thread for a message started, in seconds of `time.monotonic`.
        self._started: dict[str, float] = {}
        self._finished = threading.Event()

    def of(self, keys: Iterable[str]) -> Iterator[tuple[str, Delivery | Exception]]:
        """Wait at most `PULL_S` seconds for replies to these messages; yield those that arrived.

        An element is a message id and the reply, or the error of the call that fetched it. Replies
        to the messages that have waited longest are fetched first.

        keys  ids of the messages
        """
        wanted = sorted(keys, key=lambda key: self._started.get(key, 0.0))
        waiting = [key for key in wanted if key not in self._threads]
        end = time.monotonic() + PULL_S
        while True:
            while waiting and self._busy() < MAX_PULLS:
                self._start(waiting.pop(0))
            self._finished.clear()
            done = [key for key in wanted if key in self._threads and key in self._found]
            for key in done:
                del self._threads[key]
                found = self._found.pop(key)
                own = [found] if found is not None else []
                # Keep no reference to this reply. The caller can then free its memory before the
                # next reply arrives.
                del found
                while own:
                    yield key, own.pop()
            over = time.monotonic() >= end
            if over or not (waiting or any(key in self._threads for key in wanted)):
                return
            if not done:
                self._finished.wait(max(0.0, end - time.monotonic()))

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the replies to the messages with these ids, also those that arrive later."""
        for key in keys:
            self._threads.pop(key, None)
            self._found.pop(key, None)
            self._started.pop(key, None)

    def _busy(self) -> int:
        """Return the number of threads that hold a reply or started less than STALLED_S ago.

        At most MAX_PULLS such threads work at once.
        """
        stalled = time.monotonic() - STALLED_S
        keys = list(self._threads)
        return sum(key in self._found or self._started[key] > stalled for key in keys)

    def _start(self, key: str) -> None:
        self._started[key] = time.monotonic()
        self._threads[key] = threading.Thread(target=self._look, args=(key,), daemon=True)
        self._threads[key].start()

    def _look(self, key: str) -> None:
        found: Delivery | Exception | None
        try:
            found = self._post.take(key)
        except Exception as error:
            found = error
        if key in self._threads:
            self._found[key] = found
            self._finished.set()


class PostTransport:
    """Sends requests to clients through Flower and returns their replies.

    keys    public key of each client by name, in PEM format; None in tests on one machine, where
            a client itself tells its name
    absent  seconds to wait while no client that still has to reply is connected
    stop    called again and again while waiting; raises an error to end the run
    alive   called if Flower's SuperLink does not reply; raises an error if its process has ended
    seen    called with the names of the connected clients whenever they are looked up
    """

    def __init__(
        self,
        post: Post,
        keys: Mapping[str, bytes] | None,
        absent: float = 30.0,
        stop: Callable[[], None] = lambda: None,
        alive: Callable[[], None] = lambda: None,
        seen: Callable[[Collection[str]], None] = lambda names: None,
    ) -> None:
        self._post = post
        self._absent = absent
        self._stop = stop
        self._alive = alive
        self._seen = seen
        self._pulls = Pulls(post)
        self._names = None if keys is None else {key: name for name, key in keys.items()}
        # Without keys, a message (greeting) asks each node for its client's name. These are the
        # greetings without a reply by message id, and the names in the replies by node number.
        self._greetings: dict[str, Sent] = {}
        self._greeted_names: dict[int, str] = {}
        # Clients that did not connect during the last call of `send_all`. The next call does not
        # wait for these clients.
        self._gone: set[str] = set()

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes | Exception]]:
        """Send requests; yield (client name, reply) when a reply arrives, for `timeout` seconds.

        If a client refuses, or its reply is unreadable, the pair has an exception instead of the
        reply. A client that connects again gets its request again. Replies to requests of earlier
        calls are ignored.
        """
        exchange = Exchange(requests, timeout)
        end = time.monotonic() + timeout
        absent_end = time.monotonic() + self._absent
        try:
            while time.monotonic() < min(end, absent_end):
                self._stop()
                connected: set[str] = set()
                try:
                    connected = self._send_missing(exchange)
                    yield from self._collect(exchange)
                except LinkDownError:
                    self._alive()
                    connected = set()
                present = exchange.missing & connected
                # Before the first reply, wait for every missing client. Later, wait only for
                # missing clients that did connect during the last call.
                awaited = present or not exchange.answered or exchange.missing - self._gone
                if not exchange.missing or not awaited:
                    break
                time.sleep(POLL_S)
                if present:
                    absent_end = time.monotonic() + self._absent
        finally:
            self._gone = exchange.missing - exchange.connections.keys()
            self._pulls.forget(exchange.sent)

    def _send_missing(self, exchange: Exchange) -> set[str]:
        """Send requests over connections that are new, and return all connected clients."""
        connected = self.connected()
        for name in sorted(exchange.missing & connected.keys()):
            if exchange.connections.get(name) != connected[name]:
                self._send(exchange, name, connected[name])
        return set(connected)

    def wait_for(
        self, names: Iterable[str], enough: int, limit: float, say: Callable[[str], None]
    ) -> None:
        """Wait until at least `enough` of the clients `names` are connected.

        Raise StoppedError after `limit` seconds. When the number of connected clients changes,
        call `say` with a line about it.
        """
        wanted = set(names)
        end = time.monotonic() + limit
        last_count = -1
        while True:
            self._stop()
            try:
                count = len(wanted & self.connected().keys())
            except LinkDownError:
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
        """Return the newest connection of each connected client, by client name."""
        found: dict[str, Connection] = {}
        for node in self._post.nodes():
            name = self._name_of(node)
            connection = Connection(node.number, node.since)
            if name is not None and (name not in found or found[name].since < connection.since):
                found[name] = connection
        if self._names is None:
            self._read_greetings()
        self._seen(found)
        return found

    def _name_of(self, node: Node) -> str | None:
        if self._names is not None:
            return self._names.get(node.key)
        greeted = {sent.node for sent in self._greetings.values()} | self._greeted_names.keys()
        if node.number not in greeted:
            sent = Sent("", node.number, secrets.token_hex(32))
            self._greetings |= self._push(sent, "query", None, GREETING_TIMEOUT_S)
        return self._greeted_names.get(node.number)

    def _read_greetings(self) -> None:
        for key, reply in self._pull(self._greetings):
            sent = self._greetings.pop(key)
            if _is_genuine(reply, sent) and reply.header.get(NAME):
                self._greeted_names[sent.node] = reply.header[NAME]

    def _send(self, exchange: Exchange, name: str, connection: Connection) -> None:
        sent = Sent(name, connection.node, secrets.token_hex(32))
        pushed = self._push(sent, TRAIN, exchange.requests[name], exchange.timeout)
        exchange.sent |= pushed
        if pushed:
            exchange.connections[name] = connection
            exchange.sends[connection] += 1

    def _push(self, sent: Sent, kind: str, data: bytes | None, timeout: float) -> dict[str, Sent]:
        """Send one message, and return {message id: `sent`}; {} if Flower does not accept it.

        Flower drops the message after `timeout` seconds, so that no client answers it too late.
        """
        key = self._post.send(sent.node, kind, {NONCE: sent.nonce}, data, timeout)
        return {key: sent} if key else {}

    def _pull(self, keys: Iterable[str]) -> Iterator[tuple[str, Delivery]]:
        """Yield (message id, reply) for those of these messages whose replies have arrived."""
        for key, found in self._pulls.of(keys):
            if isinstance(found, Exception):
                raise found
            self._pulls.forget([key])
            own = [found]
            # Free the memory of a reply before the next one is fetched.
            del found
            yield key, own.pop()

    def _collect(self, exchange: Exchange) -> Iterator[tuple[str, bytes | Exception]]:
        # A client that connected again may send two replies. Fetch the second reply too. Otherwise
        # its thread would count towards MAX_PULLS and delay the replies of other clients.
        for key, reply in self._pull(exchange.sent):
            sent = exchange.sent.pop(key)
            if sent.name in exchange.answered:
                continue
            if reply.error is not None and _may_send_again(exchange, sent):
                continue
            exchange.answered.add(sent.name)
            result = [_result_of(reply, sent)]
            del reply
            yield sent.name, result.pop()


def _may_send_again(exchange: Exchange, sent: Sent) -> bool:
    """Return True if a client may get its request again; if so, forget the client's connection.

    Return False if it got the request `MOST_SENDS` times over this connection.
    """
    connection = exchange.connections.get(sent.name)
    if connection is not None and exchange.sends[connection] >= MOST_SENDS:
        return False
    exchange.connections.pop(sent.name, None)
    return True


def _result_of(reply: Delivery, sent: Sent) -> bytes | Exception:
    if reply.broken:
        return MessageError("what it sent is no message of Flower's")
    if reply.error is not None:
        # Do not use Flower's error text, because it could contain a private record.
        return RefusedError(FAILURE)
    return _checked_payload(reply, sent)


def _checked_payload(reply: Delivery, sent: Sent) -> bytes | Exception:
    if not _is_genuine(reply, sent):
        return MessageError("the answer does not come from the node that was asked")
    if reply.header.get(REFUSED):
        return RefusedError(reply.header[REFUSED][:MAX_TEXT])
    if reply.data is None:
        return MessageError("the message holds no bytes of dpfed: both sides need the same dpfed")
    return reply.data


def _is_genuine(reply: Delivery, sent: Sent) -> bool:
    """Return True if a reply comes from the asked node and has the nonce of the request."""
    nonce = reply.header.get(NONCE, "")
    same_node = reply.error is None and not reply.broken and reply.node == sent.node
    return same_node and hmac.compare_digest(nonce.encode(), sent.nonce.encode())

"""Deliver messages to Flower's nodes and fetch their replies, as plain values.

    GridPost     calls Flower's Grid; it runs in the process of Flower's ServerApp
    RelayPost    lets `dpfed server` use that GridPost through a socket

The training runs in the process of `dpfed server`, which tells the ServerApp what to send and to
fetch. The ServerApp does nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dpfed.errors import StoppedError
from dpfed.federation.flower import relay

if TYPE_CHECKING:
    from flwr.serverapp import Grid

# Seconds within which Flower's ServerApp must have started.
STARTING_S = 300.0


class LinkDownError(ConnectionError):
    """Raised if Flower's SuperLink (its process at the server) does not reply."""


@dataclass(frozen=True)
class Node:
    """A connected node (client): Flower's number, its public key, and the time it connected."""

    number: int
    key: bytes
    since: str


@dataclass(frozen=True)
class Delivery:
    """A reply that Flower has delivered.

    node    number of the node (client) that the reply names as its sender
    error   Flower's error code, or None; with an error there is neither header nor data
    header  short texts, such as the nonce (`header.py`)
    data    the bytes of the reply, or None
    broken  True if Flower could not put the reply together from its pieces
    """

    node: int = 0
    error: int | None = None
    header: dict[str, str] = field(default_factory=dict)
    data: bytes | None = None
    broken: bool = False


class Post(Protocol):
    """Interface of an object that delivers messages to nodes (clients) and fetches replies.

    Each method raises LinkDownError if Flower's SuperLink does not reply.
    """

    def nodes(self) -> list[Node]: ...

    def send(
        self, node: int, kind: str, header: dict[str, str], data: bytes | None, ttl: float
    ) -> str:
        """Send a message and return its id, or "" if Flower does not accept it.

        Flower drops the message after `ttl` seconds.
        """

    def take(self, key: str) -> Delivery | None:
        """Return the reply to the message with the id `key`; None if there is none yet."""


class GridPost:
    """Delivers messages through Flower's Grid, an object that only Flower's ServerApp has."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        found = _reached(lambda: list(self._grid.get_nodes()))
        return [Node(int(n.node_id), bytes(n.public_key), str(n.last_activated_at)) for n in found]

    def send(
        self, node: int, kind: str, header: dict[str, str], data: bytes | None, ttl: float
    ) -> str:
        from flwr.app import Message

        from dpfed.federation.flower.envelope import envelope

        message = Message(envelope(header, data), node, kind, ttl=ttl)
        ids = _reached(lambda: list(self._grid.push_messages([message])))
        return str(ids[0]) if ids and ids[0] else ""

    def take(self, key: str) -> Delivery | None:
        from dpfed.federation.flower.envelope import opened

        try:
            found = list(self._grid.pull_messages([key]))
        except OSError as error:
            raise LinkDownError(str(error)) from None
        except Exception as error:
            if _is_transport(error):
                raise LinkDownError(str(error)) from None
            return Delivery(broken=True)
        own = [reply for reply in found if reply.metadata.reply_to_message_id == key]
        if not own:
            return None
        reply = own[0]
        source = reply.metadata.src_node_id
        if reply.has_error():
            return Delivery(source, error=reply.error.code)
        header, data = opened(reply.content)
        return Delivery(source, None, header, data)


def _reached(ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`, a call of Flower's Grid; turn any error into LinkDownError."""
    try:
        return ask()
    except Exception as error:
        raise LinkDownError(f"{type(error).__name__}: {error}") from None


def _is_transport(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPError)


def serve_grid(grid: Grid, path: str) -> None:
    """Send and fetch messages as `dpfed server` asks through a socket, until it asks to end."""
    own = GridPost(grid)
    ended = threading.Event()

    def handler(header: relay.Header, data: bytes) -> tuple[relay.Header, bytes]:
        try:
            return _done(own, header, data, ended)
        except LinkDownError as error:
            return {"down": str(error)}, b""

    relay.serve(path, handler, ended)


def _done(
    own: GridPost, header: relay.Header, data: bytes, ended: threading.Event
) -> tuple[relay.Header, bytes]:
    match header["do"]:
        case "nodes":
            nodes = [[node.number, node.key.hex(), node.since] for node in own.nodes()]
            return {"nodes": nodes}, b""
        case "send":
            content = data if header["has_data"] else None
            key = own.send(header["node"], header["kind"], header["header"], content, header["ttl"])
            return {"key": key}, b""
        case "take":
            found = own.take(header["key"])
            if found is None:
                return {"found": None}, b""
            fields = asdict(found) | {"data": None}
            return {"found": fields, "has_data": found.data is not None}, found.data or b""
        case _:
            ended.set()
            return {}, b""


class RelayPost:
    """Delivers messages by way of Flower's ServerApp, which listens at the socket `path`.

    alive   raises StoppedError if Flower's SuperLink has ended
    """

    def __init__(self, path: str, alive: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._alive = alive

    def wait(self, stop: Callable[[], None] = lambda: None) -> None:
        """Wait until Flower's ServerApp has started and answers."""
        end = time.monotonic() + STARTING_S
        while True:
            stop()
            self._alive()
            try:
                relay.call(self._path, {"do": "nodes"})
                return
            except OSError:
                if time.monotonic() > end:
                    raise StoppedError("Flower's ServerApp has not started: see its log") from None
                time.sleep(0.1)

    def nodes(self) -> list[Node]:
        found = self._ask({"do": "nodes"})[0]["nodes"]
        return [Node(number, bytes.fromhex(key), since) for number, key, since in found]

    def send(
        self, node: int, kind: str, header: dict[str, str], data: bytes | None, ttl: float
    ) -> str:
        order = {"do": "send", "node": node, "kind": kind, "header": header, "ttl": ttl}
        found = self._ask({**order, "has_data": data is not None}, data or b"")
        return str(found[0]["key"])

    def take(self, key: str) -> Delivery | None:
        header, data = self._ask({"do": "take", "key": key})
        if header["found"] is None:
            return None
        return Delivery(**{**header["found"], "data": data if header["has_data"] else None})

    def end(self) -> None:
        """Let Flower's ServerApp end. Do nothing if it has ended already."""
        try:
            relay.call(self._path, {"do": "end"})
        except OSError:
            return

    def _ask(self, header: relay.Header, data: bytes = b"") -> tuple[relay.Header, bytes]:
        try:
            found = relay.call(self._path, header, data)
        except OSError as error:
            self._alive()
            raise StoppedError(
                f"Flower's ServerApp has ended ({error}): see the log of the SuperLink"
            ) from None
        if "down" in found[0]:
            raise LinkDownError(found[0]["down"])
        return found

"""`Transport` over Flower's Grid: names become nodes by their keys, and an answer counts for whom it was asked of."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.flower.envelope import NAME, TICKET, hello, opened, parcel, slip
from dpfed.federation.messages import MessageError
from dpfed.federation.policy import RefusedError

TRAIN, HELLO = "train", "query"
POLL = 0.2
FAILED = "it failed, and its own log says why"


@dataclass(frozen=True)
class BatchedRun:
    """Where a client is: its node, and since when it is connected, as a new connection knows nothing of the old one."""

    node: int
    since: str


@dataclass(frozen=True)
class Asked:
    name: str
    node: int
    ticket: str


class Pulls:
    """Looks for replies to several messages, each on its own thread.

    Flower waits inside a call until all pieces of a reply have come; a client that announces pieces and sends none would
    hold up everybody, and one whose pieces do not fit together would take the others' replies with it.
    """

    def __init__(self, grid: Grid, moment: float = 0.5) -> None:
        self._grid, self._moment = grid, moment
        self._threads: dict[str, threading.Thread] = {}
        self._found: dict[str, list[Message] | Exception] = {}

    def of(self, keys: Iterable[str]) -> list[tuple[str, list[Message] | Exception]]:
        """What has come by now, after at most a moment."""
        wanted, end = list(keys), time.monotonic() + self._moment
        for key in wanted:
            if key not in self._threads:
                self._threads[key] = threading.Thread(target=self._look, args=(key,), daemon=True)
                self._threads[key].start()
        for key in wanted:
            self._threads[key].join(max(0.0, end - time.monotonic()))
        over = [key for key in wanted if not self._threads[key].is_alive()]
        for key in over:
            del self._threads[key]
        return [(key, self._found.pop(key)) for key in over if key in self._found]

    def forget(self, keys: Iterable[str]) -> None:
        """What comes for these is not kept: nobody will ask for it."""
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
    """Brings requests to clients and their answers back.

    keys      name -> public key (PEM) of every client; None, for tests on one machine: nodes are asked for their names
    absent    seconds that clients are waited for while none of those still missing is connected
    stop      called while waiting, and may raise
    kind      which function of a ClientApp answers
    alive     called when the link does not answer, and raises if it is gone for good
    """

    def __init__(
        self,
        grid: Grid,
        keys: Mapping[str, bytes] | None,
        absent: float = 30.0,
        stop: Callable[[], None] = lambda: None,
        alive: Callable[[], None] = lambda: None,
        kind: str = TRAIN,
    ) -> None:
        self._kind, self._pulls = kind, Pulls(grid)
        self._grid, self._absent, self._stop, self._alive = grid, absent, stop, alive
        self._names = None if keys is None else {key: name for name, key in keys.items()}
        self._greeted: dict[str, Asked] = {}  # greetings under way, by message
        self._known: dict[int, str] = {}  # names that nodes have said
        self._gone: set[str] = (
            set()
        )  # waited for in vain last time: a round is not held up by them again

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> dict[str, bytes | Exception]:
        """A client that connects again in the meantime is asked again; answers to earlier calls are never looked at."""
        answers: dict[str, bytes | Exception] = {}
        places: dict[str, BatchedRun] = {}
        asked: dict[str, Asked] = {}
        now = time.monotonic()
        end, heard = now + timeout, now
        while now < end and now - heard < self._absent:
            self._stop()
            try:
                connected = self.connected()
                for name in requests.keys() - answers.keys() & connected.keys():
                    if places.get(name) != connected[name]:
                        sent = self._ask(name, connected[name], requests[name], timeout)
                        asked |= sent
                        places |= {name: connected[name]} if sent else {}
                self._collect(asked, answers, places)
            except httpx.HTTPError:
                self._alive()
                connected = {}
            missing = requests.keys() - answers.keys()
            hoped_for = missing & connected.keys() or not answers or missing - self._gone
            if not missing or not hoped_for:
                break
            time.sleep(POLL)
            now = time.monotonic()
            heard = now if missing & connected.keys() else heard
        self._gone = requests.keys() - answers.keys() - places.keys()
        self._pulls.forget(asked)
        return answers

    def wait_for(
        self, names: Iterable[str], enough: int, limit: float, say: Callable[[str], None]
    ) -> None:
        """Until so many of these clients are connected."""
        wanted, end, told = set(names), time.monotonic() + limit, -1
        while True:
            self._stop()
            try:
                here = len(wanted & self.connected().keys())
            except httpx.HTTPError:
                self._alive()
                here = 0
            if here >= enough:
                return
            if here != told:
                say(
                    f"waiting for clients: {here} of {len(wanted)} are connected, {enough} are needed"
                )
                told = here
            if time.monotonic() > end:
                raise StoppedError(
                    f"only {here} of {enough} clients that are needed have connected in {limit:g} seconds"
                )
            time.sleep(POLL)

    def connected(self) -> dict[str, BatchedRun]:
        """Who can be asked now."""
        here: dict[str, BatchedRun] = {}
        for node in self._grid.get_nodes():
            name = self._name_of(node)
            place = BatchedRun(int(node.node_id), str(node.last_activated_at))
            if name is not None and (name not in here or here[name].since < place.since):
                here[name] = place
        if self._names is None:
            self._hear()
        return here

    def _name_of(self, node: Any) -> str | None:
        if self._names is not None:
            return self._names.get(bytes(node.public_key))
        number = int(node.node_id)
        if number not in self._known and number not in {
            asked.node for asked in self._greeted.values()
        }:
            self._greeted |= self._push("", number, HELLO, hello, 60.0)
        return self._known.get(number)

    def _hear(self) -> None:
        for key, reply in self._pull(self._greeted):
            asked = self._greeted.pop(key)
            if (
                reply is not None
                and not reply.has_error()
                and _brings_back(reply, asked)
                and slip(reply.content, NAME)
            ):
                self._known[asked.node] = slip(reply.content, NAME)

    def _ask(self, name: str, place: BatchedRun, data: bytes, timeout: float) -> dict[str, Asked]:
        return self._push(
            name, place.node, self._kind, lambda ticket: parcel(data, ticket), timeout
        )

    def _push(
        self, name: str, node: int, kind: str, content: Callable[[str], Any], ttl: float
    ) -> dict[str, Asked]:
        """What Flower still holds when its time is over is never delivered: nobody spends for a round that is past."""
        ticket = secrets.token_hex(32)
        message = Message(content(ticket), node, kind, ttl=ttl)
        return {
            str(key): Asked(name, node, ticket)
            for key in self._grid.push_messages([message])
            if key
        }

    def _pull(self, asked: Mapping[str, Asked]) -> list[tuple[str, Message | None]]:
        """Replies by what they reply to; None where Flower cannot put together what a client has sent."""
        found: list[tuple[str, Message | None]] = []
        for key, replies in self._pulls.of(asked):
            if isinstance(replies, httpx.HTTPError):
                raise replies
            if isinstance(replies, Exception):
                found.append((key, None))
            else:
                found += [
                    (key, reply) for reply in replies if reply.metadata.reply_to_message_id == key
                ]
        return found

    def _collect(
        self,
        asked: dict[str, Asked],
        answers: dict[str, bytes | Exception],
        places: dict[str, BatchedRun],
    ) -> None:
        waiting = {key: each for key, each in asked.items() if each.name not in answers}
        for key, reply in self._pull(waiting):
            each = asked.pop(key)
            if reply is None:
                answers[each.name] = MessageError("what it sent is no message of Flower's")
            elif not reply.has_error():
                answers[each.name] = _answer(reply, each)
            elif _is_from_link(reply):
                places.pop(
                    each.name, None
                )  # it went away with the request: it is asked again when it is back
            else:
                answers[each.name] = RefusedError(
                    FAILED
                )  # Flower would tell what was raised there; nobody needs to know


def _answer(reply: Message, asked: Asked) -> bytes | Exception:
    try:
        if reply.metadata.src_node_id != asked.node or not _brings_back(reply, asked):
            raise MessageError("the answer does not come from the node that was asked")
        return opened(reply.content)
    except DpfedError as error:
        return error


def _brings_back(reply: Message, asked: Asked) -> bool:
    return hmac.compare_digest(slip(reply.content, TICKET).encode(), asked.ticket.encode())


def _is_from_link(reply: Message) -> bool:
    """The SuperLink's own word that a node or its message is not to be had, as opposed to an error of a client."""
    from flwr.common.constant import ErrorCode

    gone = (
        ErrorCode.NODE_UNAVAILABLE,
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    )
    return reply.error.code in gone

"""Send requests and replies between two processes on one machine, over a Unix socket.

A message has these parts:

    4 bytes    length of the header, little-endian
    8 bytes    length of the data
    header     a JSON object
    data       bytes

Flower runs its apps in processes of their own. The apps exchange all messages with `dpfed server`
or `dpfed client` through such a socket. It is in a folder that only its owner can open.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Header = dict[str, Any]
Handler = Callable[[Header, bytes], tuple[Header, bytes]]
LENGTHS = struct.Struct("<IQ")
HEADER_LIMIT = 1 << 20
# Longest wait in seconds for the next bytes of a message that another process on this machine
# sends.
PATIENCE_S = 60.0
SOCKET = "relay"


class RelayError(ConnectionError):
    """Raised if the other process sends too much, or ends before it has sent everything."""


def send(sock: socket.socket, header: Header, data: bytes) -> None:
    text = json.dumps(header).encode()
    sock.sendall(LENGTHS.pack(len(text), len(data)) + text)
    # Do not send empty data. The message is complete without it, and the other process may have
    # replied and ended already. Sending would then raise an error.
    if data:
        sock.sendall(data)


def receive(sock: socket.socket, limit: int | None) -> tuple[Header, bytes]:
    """Read a message: its header and data. Raise RelayError for more than `limit` bytes of data."""
    header_size, size = LENGTHS.unpack(_exactly(sock, LENGTHS.size))
    if header_size > HEADER_LIMIT or (limit is not None and size > limit):
        raise RelayError(f"{size:,} bytes are more than {limit or HEADER_LIMIT:,}")
    header = json.loads(_exactly(sock, header_size))
    return header, _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise RelayError("the other process has ended")
        view = view[count:]
    return bytes(found)


def call(
    path: str, header: Header, data: bytes = b"", limit: int | None = None
) -> tuple[Header, bytes]:
    """Send a request to the process that listens at `path`, and wait for its reply."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        send(sock, header, data)
        return receive(sock, limit)


@dataclass(frozen=True)
class Call:
    """A request that another process has sent through the socket and waits to be answered."""

    sock: socket.socket
    header: Header
    data: bytes

    def answer(self, handler: Handler) -> None:
        """Send the reply that `handler` returns. Raise no error if the other process has ended."""
        with self.sock:
            header, data = handler(self.header, self.data)
            with suppress(OSError):
                send(self.sock, header, data)


class Listener:
    """Accepts requests of other processes on a Unix socket at `path`."""

    def __init__(self, path: str, limit: int | None = None) -> None:
        self.path = path
        self._limit = limit
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen()

    def next(self, timeout: float) -> Call | None:
        """Return the next request; None if no valid one arrives within `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            sock = self._socket.accept()[0]
        except TimeoutError:
            return None
        sock.settimeout(PATIENCE_S)
        try:
            header, data = receive(sock, self._limit)
        except (OSError, ValueError):
            sock.close()
            return None
        sock.settimeout(None)
        return Call(sock, header, data)

    def close(self) -> None:
        self._socket.close()


def serve(path: str, handler: Handler, ended: threading.Event) -> None:
    """Answer requests at the socket `path`, each in a thread of its own, until `ended` is set."""
    listener = Listener(path)
    try:
        while not ended.is_set():
            found = listener.next(0.2)
            if found is not None:
                threading.Thread(target=found.answer, args=(handler,), daemon=True).start()
    finally:
        listener.close()


@contextmanager
def private_path() -> Iterator[str]:
    """Yield the path of a socket in a new folder that only this user can open.

    The folder is a temporary one with a short path, because a socket's path has at most 107 bytes.
    """
    base = None if len(tempfile.gettempdir()) < 60 else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="dpfed-", dir=base))
    try:
        yield os.fspath(folder / SOCKET)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""The guard: a reverse proxy in front of Flower's port that passes only permitted requests.

At the server, the guard is between the clients and the SuperLink (Flower's process there). The
SuperLink has one port for clients and for administration, so only requests to the URL paths of
clients pass. Otherwise, anyone could register keys, stop the run or start code.

At a client, the guard is between the SuperNode (Flower's process there) and the server. A SuperNode
runs the app that the server sends. Therefore, an app passes only if it has the files of
`app_folder.py` and names dpfed's own functions. Such an app contains no code.
"""

from __future__ import annotations

import email.utils
import ssl
import sys
import time
import tomllib
import zipfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from io import BytesIO
from typing import Any

import httpx

from dpfed.federation.flower.app_folder import PROJECT, app_files

FLEET = "/v1/fleet/"
GET_APP = FLEET + "get-fab"
PULL_OBJECT = FLEET + "pull-object"
# URL paths that a client may request. All other paths are refused, so that new paths in later
# versions of Flower cannot bring apps to a client unchecked.
CLIENT_PATHS = frozenset(
    FLEET + name
    for name in (
        "register-node",
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
# Largest HTTP request in bytes. Flower sends a large message as several requests of about 5 MiB, so
# this limit does not stop it.
MAX_REQUEST = 32 << 20
MAX_APP = 1 << 20
TIMEOUT_S = 60.0
# Flower refuses a client whose clock is ahead of the server's clock by more seconds than this.
CLOCK_TOLERANCE_S = 5
# HTTP headers that hold only for one connection. A proxy must not pass them on.
HOP_BY_HOP = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade host content-length date "
    b"server content-encoding accept-encoding proxy-authorization proxy-connection".split()
)
ZIP = b"PK\x03\x04"
MANIFEST = ".info/CONTENT"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class AppError(ValueError):
    """Raised for an app from the server that could run the server's code at a client."""


def note(line: str) -> None:
    """Write a line to the log. It begins with "dpfed: ", by which other processes find the line."""
    print(f"dpfed: {line}", file=sys.stderr, flush=True)


class Guard:
    """An ASGI application that passes permitted HTTP requests to `upstream`, and refuses others.

    upstream  scheme, host and port, such as https://127.0.0.1:8000
    verify    TLS context for the connection to `upstream`
    client    True at a client: only requests to `CLIENT_PATHS` pass, and apps are checked
    """

    def __init__(self, upstream: str, verify: ssl.SSLContext | bool, client: bool) -> None:
        self._upstream = upstream
        self._http = httpx.AsyncClient(verify=verify, timeout=TIMEOUT_S, trust_env=False)
        self._client = client
        self._noted: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: Headers = list(scope["headers"])
        status = self.refusal(scope, dict(headers))
        if status:
            await _respond(send, status, [], b"")
            return
        body = await _body(receive)
        if body is None:
            await _respond(send, 413, [], b"")
            return
        await _respond(send, *await self._forward(str(scope["path"]), headers, body))

    def refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> int:
        """Return the HTTP status with which a request is refused, or 0 if the request may pass."""
        path = str(scope["path"])
        open_path = path in CLIENT_PATHS if self._client else path.startswith(FLEET)
        plain = ".." not in path and not scope.get("query_string")
        if scope["method"] != "POST" or not open_path or not plain:
            return 404
        length = headers.get(b"content-length", b"0")
        long = not length.isdigit() or int(length) > MAX_REQUEST or b"transfer-encoding" in headers
        return 413 if long else 0

    async def _forward(
        self, path: str, headers: Headers, body: bytes
    ) -> tuple[int, Headers, bytes]:
        try:
            answer = await self._http.post(
                self._upstream + path,
                content=body,
                headers=[*_kept(headers), (b"accept-encoding", b"identity")],
            )
        except httpx.HTTPError as error:
            text = str(error) or type(error).__name__
            # A SuperNode gives up after status 400 and tries again after status 503. A bad
            # certificate does not improve by trying again.
            status = 400 if "certificate" in text.lower() else 503
            if status == 400:
                self._note_once(text)
            return status, [], text.encode()
        if self._client:
            self._check_clock(answer)
            try:
                check_answer(path, answer.content)
            except AppError as error:
                self._note_once(f"refused the app that the server has sent: {error}")
                return 403, [], b""
        return answer.status_code, _kept(answer.headers.raw), answer.content

    def _check_clock(self, answer: httpx.Response) -> None:
        try:
            there = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
        except (KeyError, ValueError):
            return
        ahead = time.time() - there
        if answer.status_code == 401 and abs(ahead) > CLOCK_TOLERANCE_S:
            self._note_once(
                f"this machine's clock is {ahead:+.0f} s from the server's, and Flower accepts "
                f"{CLOCK_TOLERANCE_S}: set the clock"
            )

    def _note_once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            note(line)


def _kept(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


async def _body(receive: Receive) -> bytes | None:
    """Return the body of an HTTP request; None if it is too long or incomplete."""
    found = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        found += message.get("body", b"")
        if len(found) > MAX_REQUEST:
            return None
        if not message.get("more_body"):
            return bytes(found)


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def check_answer(path: str, body: bytes) -> None:
    """Raise AppError if an HTTP response of the server could bring code to this client."""
    if path == GET_APP:
        if body:
            check_app(app_in(body))
    elif path != PULL_OBJECT and ZIP in body:
        raise AppError("an archive came where Flower sends none")


def app_in(body: bytes) -> bytes:
    """Return the app (a ZIP file) in an HTTP response of the server.

    The response is a protocol buffer with a single field, number 1. Field 2 inside this field is
    the app. Only this exact form is accepted, so that no second app can be hidden in the response.
    """
    outer = list(_fields(body))
    if [number for number, _ in outer] != [1]:
        raise AppError("the answer has another form than Flower's")
    inner = list(_fields(outer[0][1]))
    found = [value for number, value in inner if number == 2]
    if len(found) != 1 or not {number for number, _ in inner} <= {1, 2, 3}:
        raise AppError("the answer has another form than Flower's")
    return found[0]


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, value) of each field of a protocol buffer.

    Raise AppError for a field of another type than bytes with a length.
    """
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        size, at = _number(data, at)
        if tag & 7 != 2 or at + size > len(data):
            raise AppError("the answer has another form than Flower's")
        yield tag >> 3, data[at : at + size]
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer (varint) at position `at`, and the position after it."""
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value, at + i + 1
    raise AppError("the answer has another form than Flower's")


def check_app(data: bytes) -> None:
    """Raise AppError unless an app (a ZIP file) has no code and names only functions of dpfed."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            if sorted(names) != sorted([*app_files(), MANIFEST]):
                extra = sorted(set(names) - {*app_files(), MANIFEST})
                raise AppError(f"it holds {', '.join(extra)[:200] or 'other files than dpfed'}")
            if min(member.header_offset for member in members) != 0:
                raise AppError("something stands before its archive")
            if sum(member.file_size for member in members) > MAX_APP:
                raise AppError("its files are too large")
            project = tomllib.loads(archive.read("pyproject.toml").decode())
    except (zipfile.BadZipFile, ValueError, RecursionError, NotImplementedError) as error:
        raise AppError(str(error)) from None
    if identity(project) != identity(tomllib.loads(PROJECT)):
        raise AppError("its pyproject.toml names other functions than dpfed's")


def identity(project: dict[str, Any]) -> list[Any]:
    """Return the entries of an app's pyproject.toml that decide which code the app runs."""
    tool = project.get("tool", {})
    app = tool.get("flwr", {}).get("app", {}) if isinstance(tool, dict) else {}
    own = project.get("project", {})
    return [own.get("name"), own.get("version"), app.get("publisher"), app.get("components")]

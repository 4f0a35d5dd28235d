"""The guard: only clients' requests pass, and no server can send code to a client."""

from __future__ import annotations

import asyncio
import zipfile
from io import BytesIO
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from dpfed.federation.flower import guard as module
from dpfed.federation.flower.app_folder import PROJECT, app_files
from dpfed.federation.flower.guard import (
    GET_APP,
    MANIFEST,
    PULL_OBJECT,
    AppError,
    Guard,
    app_in,
    check_answer,
    check_app,
)

PULL = "/v1/fleet/pull-messages"


class Upstream:
    """Answers the guard's requests, and remembers them."""

    def __init__(self, body: bytes = b"fine", status: int = 200, **headers: str) -> None:
        self.asked: list[httpx.Request] = []
        self._answer = (status, headers, body)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        status, headers, body = self._answer
        return httpx.Response(status, headers=headers, content=body)


def passed(
    upstream: Any,
    path: str = PULL,
    headers: list[tuple[bytes, bytes]] | None = None,
    client: bool = False,
    method: str = "POST",
    query: bytes = b"",
    body: bytes = b"request",
) -> tuple[int, bytes]:
    """Return status and body of the guard's answer."""
    guard: Any = Guard("http://127.0.0.1:1", False, client)
    guard._http = httpx.AsyncClient(transport=httpx.MockTransport(upstream))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    scope = {
        "type": "http",
        "path": path,
        "headers": headers or [],
        "method": method,
        "query_string": query,
    }
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("client", [False, True])
def test_a_clients_request_passes_with_its_headers_and_bytes(client: bool) -> None:
    upstream = Upstream()
    headers = [(b"x-signature", b"abc"), (b"connection", b"close"), (b"host", b"elsewhere")]
    assert passed(upstream, headers=headers, client=client) == (200, b"fine")
    request = upstream.asked[0]
    assert (request.url.path, request.content) == (PULL, b"request")
    assert request.headers["x-signature"] == "abc"
    assert request.headers["host"] == "127.0.0.1:1"


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet",
        "/docs",
        "/",
    ],
)
def test_nothing_else_passes(path: str, client: bool) -> None:
    upstream = Upstream()
    assert passed(upstream, path, client=client)[0] == 404
    assert not upstream.asked


def test_only_plain_posts_pass_and_a_client_asks_for_what_is_known() -> None:
    upstream = Upstream()
    assert passed(upstream, method="GET")[0] == 404
    assert passed(upstream, query=b"a=1")[0] == 404
    assert passed(upstream, "/v1/fleet/get-code")[0] == 200
    assert passed(upstream, "/v1/fleet/get-code", client=True)[0] == 404
    assert len(upstream.asked) == 1


def test_no_client_sends_more_at_once_than_flower_does(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/v1/fleet/push-object"

    def status(*header: bytes) -> int:
        return passed(Upstream(), path, [header])[0]  # type: ignore[list-item]

    assert status(b"content-length", b"5300000") == 200
    assert status(b"content-length", b"2147483648") == 413
    assert status(b"content-length", b"-1") == 413
    assert status(b"transfer-encoding", b"chunked") == 413
    monkeypatch.setattr(module, "MAX_REQUEST", 3)
    assert passed(Upstream(), path)[0] == 413, "a body longer than its header says"


def test_a_server_that_is_away_can_be_asked_again_and_a_wrong_certificate_cannot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    def expired(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("certificate verify failed: certificate has expired")

    assert passed(away, client=True)[0] == 503
    assert capsys.readouterr().err == ""
    assert passed(expired, client=True)[0] == 400
    assert "dpfed: certificate verify failed: certificate has expired" in capsys.readouterr().err


def test_a_wrong_clock_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    upstream = Upstream(b"", 401, date="Thu, 01 Jan 2026 00:00:00 GMT")
    assert passed(upstream, client=True)[0] == 401
    assert "set the clock" in capsys.readouterr().err


# ------------------------------------------------------------------ apps


def field(number: int, value: bytes) -> bytes:
    """Return a field of a protocol buffer."""
    size = len(value)
    digits = b""
    while size > 127:
        digits += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + digits + bytes([size]) + value


def archive(files: dict[str, bytes]) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, data in files.items():
            made.writestr(name, data)
    return out.getvalue()


OWN = archive({**app_files(), MANIFEST: b""})
EVIL = archive({**app_files(), MANIFEST: b"", "dpfed.py": b"steal()"})


def answer_of(app: bytes) -> bytes:
    return field(1, field(1, b"hash") + field(2, app) + field(3, b"signature"))


def test_dpfeds_own_app_passes() -> None:
    check_answer(GET_APP, answer_of(OWN))
    check_answer(GET_APP, b"")
    assert app_in(answer_of(OWN)) == OWN
    assert passed(Upstream(answer_of(OWN)), GET_APP, client=True) == (200, answer_of(OWN))


def test_an_app_with_code_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert passed(Upstream(answer_of(EVIL)), GET_APP, client=True) == (403, b"")
    assert "refused the app that the server has sent: it holds dpfed.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dpfed.federation.flower.apps:client", "os:system"),
        ("dpfed.federation.flower.apps:server", "os:system"),
        ('publisher = "dpfed"', 'publisher = "../../evil"'),
        ('name = "dpfed-federation"', 'name = "../evil"'),
        ('version = "1.0.0"', 'version = "../1"'),
        ("[tool.flwr.app.components]", '[tool.flwr.app.components]\nagentapp = "os:system"'),
        ("[project]", "[project"),
    ],
)
def test_an_app_that_names_other_functions_or_folders_does_not_pass(old: str, new: str) -> None:
    assert old in PROJECT
    files = {**app_files(), "pyproject.toml": PROJECT.replace(old, new).encode(), MANIFEST: b""}
    with pytest.raises(AppError):
        check_app(archive(files))


@pytest.mark.parametrize(
    "body",
    [
        answer_of(OWN) + answer_of(EVIL),
        field(1, field(2, OWN) + field(2, EVIL)),
        field(1, field(2, OWN)) + field(2, EVIL),
        field(1, field(2, OWN) + field(4, EVIL)),
        field(2, field(2, OWN)),
        answer_of(OWN)[:-1],
        b"\x08\x01",
        b"\xff" * 20,
        answer_of(EVIL + OWN),
        answer_of(b"PK\x03\x04 no archive"),
    ],
)
def test_no_second_app_can_be_hidden_in_an_answer(body: bytes) -> None:
    with pytest.raises(AppError):
        check_answer(GET_APP, body)


def test_two_files_of_one_name_do_not_pass() -> None:
    out = BytesIO(OWN)
    with zipfile.ZipFile(out, "a") as made, pytest.warns(UserWarning, match="Duplicate"):
        made.writestr("pyproject.toml", b"")
    with pytest.raises(AppError):
        check_app(out.getvalue())


def test_an_archive_passes_as_part_of_a_message_only() -> None:
    check_answer(PULL_OBJECT, b"tensor " + EVIL)
    with pytest.raises(AppError, match="where Flower sends none"):
        check_answer("/v1/fleet/get-run", b"run " + EVIL)

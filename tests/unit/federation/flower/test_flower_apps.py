"""The ClientApp sends public texts only; the SuperLink's guard is open to clients only."""

from __future__ import annotations

import asyncio
import zipfile
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from dpfed.federation.flower.apps import app_files, client, client_app
from dpfed.federation.flower.child import Guard
from dpfed.federation.flower.envelope import NONCE, REFUSED, envelope, header_value, payload_of
from dpfed.federation.messages import MessageError
from dpfed.federation.policy import RefusedError


def asked(data: bytes = b"request") -> Message:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    message = Message(envelope(data, "the nonce"), 7, "train")
    message.metadata.__dict__["_message_id"] = "m"
    return message


def reply_of(answer: Any, log: list[str] | None = None) -> Message:
    app = client_app(answer, "clinic-a", (log if log is not None else []).append)
    return app(asked(), SimpleNamespace())  # type: ignore[arg-type]


def test_bytes_go_through_as_they_are_and_the_nonce_comes_back() -> None:
    # More than one piece of Flower's.
    data = bytes(range(256)) * 50_000
    reply = reply_of(lambda request: data if request == b"request" else b"")
    assert payload_of(reply.content) == data
    assert header_value(reply.content, NONCE) == "the nonce"
    assert reply.metadata.reply_to_message_id == "m"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RefusedError("refused: sigma 0.1 is below policy.min_sigma = 0.5"), "refused: sigma 0.1"),
        (MessageError("the message has 9 bytes"), "the message has 9 bytes"),
        (ValueError("row 17 of patients.csv: Jane Doe"), "its own log says why"),
        (OSError(28, "No space left on device", "/home/clinic/ledger.db"), "its own log says why"),
    ],
)
def test_of_an_error_the_server_hears_only_what_is_public(error: Exception, said: str) -> None:
    def answer(data: bytes) -> bytes:
        raise error

    log: list[str] = []
    reply = reply_of(answer, log)
    assert not reply.has_error()
    text = header_value(reply.content, REFUSED)
    assert said in text
    assert "Jane" not in text
    assert "/home" not in text
    assert str(error) in log[0], "its own log says all of it"
    with pytest.raises(RefusedError):
        payload_of(reply.content)


def test_a_long_refusal_is_cut() -> None:
    def answer(data: bytes) -> bytes:
        raise RefusedError("x" * 9999)

    assert len(header_value(reply_of(answer).content, REFUSED)) == 300


def test_under_flowers_own_supernode_the_client_says_which_file_is_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    context: Any = SimpleNamespace(
        node_config={}, run_config={"dpfed-client": "/the/servers/choice.toml"}
    )
    reply = client(asked(), context)
    assert "its own log says why" in header_value(reply.content, REFUSED)
    assert "--node-config" in capsys.readouterr().err


def test_the_app_that_the_server_sends_along_holds_no_code() -> None:
    from flwr.cli.build import build_fab_from_files

    files: dict[str, Any] = dict(app_files())
    with zipfile.ZipFile(BytesIO(build_fab_from_files(files)[0])) as fab:
        assert not [name for name in fab.namelist() if name.endswith((".py", ".so", ".pyc"))]


def status_of(path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> int:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(Guard(app, "s3cret")(scope, receive, send))
    return int(sent[0]["status"]) if sent else 0


def test_clients_reach_what_is_for_them_and_only_the_server_the_rest() -> None:
    right, wrong = [(b"x-dpfed-secret", b"s3cret")], [(b"x-dpfed-secret", b"guess")]
    assert status_of("/v1/fleet/pull-messages", []) == 200
    for path in (
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "/",
    ):
        assert status_of(path, []) == 404
        assert status_of(path, wrong) == 404
        assert status_of(path, right) == 200
    assert status_of("/v1/fleet/../control/start-run", []) == 404
    assert status_of("/v1/fleet", []) == 404
    assert status_of("/v1/control/start-run", right, kind="websocket") == 0


def test_no_client_sends_more_at_once_than_flower_does() -> None:
    path = "/v1/fleet/push-object"
    assert status_of(path, [(b"content-length", b"5300000")]) == 200
    assert status_of(path, [(b"content-length", b"2147483648")]) == 413
    assert status_of(path, [(b"content-length", b"-1")]) == 413
    assert status_of(path, [(b"transfer-encoding", b"chunked")]) == 413

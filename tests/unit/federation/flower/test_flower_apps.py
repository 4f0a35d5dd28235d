"""The apps pass messages on, and a client's answers have public texts only."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

import dpfed
from dpfed.federation.flower.answering import Answerer
from dpfed.federation.flower.app_folder import app_files
from dpfed.federation.flower.apps import _own_client
from dpfed.federation.flower.envelope import DATA, HEADER, PAYLOAD, envelope, opened
from dpfed.federation.flower.header import NONCE, REFUSED
from dpfed.federation.flower.post import GridPost, LinkDownError
from dpfed.federation.messages import MessageError
from dpfed.federation.policy import RefusedError

TESTS = Path(__file__).parents[3]
PUBLIC = {"app", "serverapp", "clientapp", "simulation"}
REQUEST = {"kind": "train", "header": {NONCE: "the nonce"}, "has_data": True}


def answered(answer: Any, log: list[str] | None = None) -> tuple[dict[str, Any], bytes]:
    own = Answerer(answer, "clinic-a", (log if log is not None else []).append)
    return own(REQUEST, b"request")


def test_bytes_go_through_as_they_are_and_the_nonce_comes_back() -> None:
    header, data = answered(lambda request: request * 3)
    assert data == b"request" * 3
    assert header == {"header": {NONCE: "the nonce"}, "has_data": True}


def test_messages_of_flower_keep_bytes_and_texts() -> None:
    data = bytes(range(256)) * 50_000
    content = envelope({NONCE: "n"}, data)
    assert opened(content) == ({NONCE: "n"}, data)
    assert content[PAYLOAD][DATA].data == data
    assert opened(envelope({REFUSED: "no"}, None)) == ({REFUSED: "no"}, None)
    assert opened(RecordDict({HEADER: ConfigRecord({NONCE: 3})})) == ({}, None)
    assert opened(RecordDict()) == ({}, None)


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
    header, data = answered(answer, log)
    text = header["header"][REFUSED]
    assert said in text
    assert "Jane" not in text
    assert "/home" not in text
    assert str(error) in log[0], "its own log says all of it"
    assert (data, header["has_data"]) == (b"", False)


def test_a_long_refusal_is_cut() -> None:
    def answer(data: bytes) -> bytes:
        raise RefusedError("x" * 9999)

    assert len(answered(answer)[0]["header"][REFUSED]) == 300


def test_under_flowers_own_supernode_the_client_says_which_file_is_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    header, _ = _own_client(None)(REQUEST, b"request")
    assert "its own log says why" in header["header"][REFUSED]
    assert "--node-config" in capsys.readouterr().err


def test_the_app_that_the_server_sends_along_holds_no_code() -> None:
    assert not [name for name in app_files() if name.endswith((".py", ".so", ".pyc"))]


class FakeGrid:
    """Flower's Grid with one node and a list of replies, or an error."""

    def __init__(self, *found: Any) -> None:
        self.found = found

    def get_nodes(self) -> list[Any]:
        return self.pull_messages([]) and [
            SimpleNamespace(node_id=2**63, public_key=b"key", last_activated_at="now")
        ]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        if isinstance(self.found[0], Exception):
            raise self.found[0]
        return list(self.found)


def flower_reply(to: str, error: int | None = None) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=to, src_node_id=7),
        has_error=lambda: error is not None,
        error=SimpleNamespace(code=error),
        content=envelope({NONCE: "n"}, b"data"),
    )


def test_replies_of_flowers_grid_become_plain_values() -> None:
    post: Any = GridPost(FakeGrid(flower_reply("other"), flower_reply("m")))  # type: ignore[arg-type]
    found = post.take("m")
    assert (found.node, found.header, found.data, found.error) == (7, {NONCE: "n"}, b"data", None)
    assert post.take("none") is None
    assert post.nodes()[0].number == 2**63
    failed = GridPost(FakeGrid(flower_reply("m", 5))).take("m")  # type: ignore[arg-type]
    assert failed is not None
    assert (failed.error, failed.data) == (5, None)


def test_messages_are_freed_without_the_garbage_collector() -> None:
    arrays: list[Any] = []

    class Arriving(FakeGrid):
        def pull_messages(self, ids: list[str]) -> list[Any]:
            reply = flower_reply("m")
            arrays.append(weakref.ref(reply.content[PAYLOAD][DATA]))
            return [reply]

    post = GridPost(Arriving())  # type: ignore[arg-type]
    gc.disable()
    try:
        found = post.take("m")
        assert found is not None
        assert found.data == b"data"
        assert arrays[0]() is None
    finally:
        gc.enable()


def test_a_link_that_is_away_is_told_from_a_broken_reply() -> None:
    import httpx

    away: Any = GridPost(FakeGrid(httpx.ConnectError("refused")))  # type: ignore[arg-type]
    with pytest.raises(LinkDownError):
        away.take("m")
    with pytest.raises(LinkDownError):
        away.nodes()
    broken = GridPost(FakeGrid(KeyError("no such object"))).take("m")  # type: ignore[arg-type]
    assert broken is not None
    assert broken.broken


def private_names(source: str) -> list[str]:
    """Return the modules of Flower in a source text that are not its public interface.

    Strings count as well, because a module can be imported or replaced by its name.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.replace(".", "").isidentifier() else []
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            private = len(parts) > 1 and (
                parts[1] not in PUBLIC or any(part.startswith("_") for part in parts[1:])
            )
            if parts[0] == "flwr" and private:
                found.append(name)
    return found


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import flwr", False),
        ("from flwr.app import Message", False),
        ("from flwr.serverapp.strategy import FedAvg", False),
        ("from flwr.common.constant import ErrorCode", True),
        ("from flwr import supercore", True),
        ("import flwr.proto.run_pb2", True),
        ("import_module('flwr.supernode.cli')", True),
        ("import flwr\nflwr.superlink.main", True),
        ("from flwr.clientapp import _private", True),
    ],
)
def test_the_search_for_private_names_finds_them(source: str, private: bool) -> None:
    assert bool(private_names(source)) == private


def test_only_flowers_public_modules_are_used() -> None:
    root = Path(dpfed.__file__).parent
    files = [*root.rglob("*.py"), *TESTS.rglob("*.py")]
    files = [path for path in files if path != Path(__file__)]
    assert len(files) > 400
    found = {str(path): private_names(path.read_text(encoding="utf-8")) for path in files}
    assert not {path: names for path, names in found.items() if names}

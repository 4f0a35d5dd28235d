"""Tasks of a SuperNode: an answer that it does not take makes the client connect again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from dpfed.federation.flower import node as module
from dpfed.federation.flower.node import Tasks
from dpfed.federation.links import Address


class FakeClient:
    """A connection to a SuperNode that has one task."""

    def __init__(self) -> None:
        self.closed = False

    def AcquireTask(self, request: Any) -> Any:
        return SimpleNamespace(HasField=lambda name: True, token="token")

    def close(self) -> None:
        self.closed = True


def test_a_dropped_message_raises_the_error_that_reconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dropped(*arguments: Any) -> None:
        raise ObjectPushError("object", 1, "session")

    sender = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(module, "HeartbeatSender", lambda send: sender)
    monkeypatch.setattr(module, "pull_task_input", lambda client: ("message", "context", 0, 0))
    monkeypatch.setattr(module, "push_message", dropped)
    app: Any = lambda message, context: "reply"  # noqa: E731
    tasks = Tasks(Address("127.0.0.1", 1), "secret", app)
    fake = FakeClient()
    monkeypatch.setattr(tasks, "_executor", fake)
    monkeypatch.setattr(tasks, "_client", lambda *interceptors: fake)
    with pytest.raises(RuntimeError, match="did not take an answer"):
        tasks.next()
    assert fake.closed

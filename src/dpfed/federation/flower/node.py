"""Take tasks from a client's own SuperNode and answer them with a ClientApp.

The SuperNode also fetches the app (code) that the server sends. This module never unpacks it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import httpx
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from dpfed.federation.links import Address

ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class Tasks:
    """Takes tasks from a SuperNode and answers them with `app`."""

    def __init__(self, address: Address, secret: str, app: ClientApp) -> None:
        self._address = str(address)
        self._app = app
        self._executor = self._client(
            RuntimeVersionHttpInterceptor("SuperExec"), acquire_signature(secret)
        )

    def next(self) -> bool:
        """Answer one waiting task and return True; return False if no task is waiting.

        Raise httpx.HTTPError if the SuperNode does not reply. Raise RuntimeError if it has dropped
        the request, so that the client must connect again.
        """
        found = self._executor.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        )
        if not found.HasField("task") or not found.token:
            return False
        client = self._client(
            RuntimeVersionHttpInterceptor("flwr-clientapp"),
            RuntimeTokenHttpInterceptor(found.token),
        )
        sender = HeartbeatSender(heartbeat(client))
        sender.start()
        try:
            message, context, _, _ = pull_task_input(client)
            reply = self._app(message, context)
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        except ObjectPushError as error:
            # Flower has dropped the request. After a new connection the server repeats it, and the
            # client sends its stored reply.
            raise RuntimeError("the SuperNode did not take an answer") from error
        finally:
            with suppress(RuntimeError):
                sender.stop()
            client.close()
        return True

    def close(self) -> None:
        self._executor.close()

    def _client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(self._address, True, None, list(interceptors))


def acquire_signature(secret: str) -> SuperExecAuthHttpInterceptor:
    """Return an interceptor that signs requests for tasks with the secret."""
    return SuperExecAuthHttpInterceptor(master_secret=secret.encode(), protected_methods=ACQUIRE)


def heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Return a function that reports to Flower that the task is still being computed.

    It is used instead of Flower's own function, which ends this process with a signal if the report
    is refused.
    """

    def send() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPError:
            # The report was refused because the task has ended. Return True to prevent a retry.
            return True
        return True

    return send

"""The client's side of its own SuperNode: takes the tasks that come in, and answers them with a ClientApp of ours.

The SuperNode has fetched the server's app along with its messages. It is never unpacked here.
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
    """What a SuperNode has to be done; `next` does one of it."""

    def __init__(self, address: Address, secret: str, app: ClientApp) -> None:
        self._address, self._app = str(address), app
        signed = SuperExecAuthHttpInterceptor(
            master_secret=secret.encode(), protected_methods=ACQUIRE
        )
        speakers: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor("SuperExec"),
            signed,
        ]
        self._executor = RuntimeHttpClient.from_server_address(self._address, True, None, speakers)

    def next(self) -> bool:
        """Whether there was one. httpx.HTTPError: the SuperNode is not there, or not yet."""
        found = self._executor.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        )
        if not found.HasField("task") or not found.token:
            return False
        speakers: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor("flwr-clientapp"),
            RuntimeTokenHttpInterceptor(found.token),
        ]
        client = RuntimeHttpClient.from_server_address(self._address, True, None, speakers)
        beat = HeartbeatSender(heartbeat(client))
        beat.start()
        try:
            message, context, _, _ = pull_task_input(client)
            reply = self._app(message, context)
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            with suppress(RuntimeError):
                beat.stop()
            client.close()
        return True

    def close(self) -> None:
        self._executor.close()


def heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Says that the task is being worked on. Flower's own would end this process with a signal when it is refused."""

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPError:
            return True  # refused: the task is over, and saying it again does not help
        return True

    return beat

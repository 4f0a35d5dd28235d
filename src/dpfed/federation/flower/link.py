"""Connect the server to its own SuperLink: register client keys, open a run, and return its Grid.

Flower would start a new process for the ServerApp. Here, the process of `dpfed server` runs the
ServerApp's task itself. Round loop, progress, signals and checkpoints then work as in `dpfed run`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import (
    ProtobufCall,
    ProtobufClientInterceptor,
    ProtobufRequestContext,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from dpfed.errors import DpfedError
from dpfed.federation.flower.apps import app_files
from dpfed.federation.flower.child import SECRET_HEADER
from dpfed.federation.flower.node import acquire_signature, heartbeat
from dpfed.federation.links import Address

RETRY_S = 60.0


class Secret:
    """An interceptor that adds the server's secret to every request, as `child.Guard` requires."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self._secret
        return call_next(context)


class OwnGrid(HttpGrid):
    """Flower's Grid without retries.

    After a run, Flower's own retries would end this process with a signal.
    """

    def __init__(self, address: Address, authority: bytes | None, token: str, secret: str) -> None:
        super().__init__(str(address), authority is None, authority, token=token)
        interceptors = [*_interceptors(secret), RuntimeTokenHttpInterceptor(token)]
        self._client = RuntimeHttpClient.from_server_address(
            str(address), authority is None, authority, interceptors
        )

    def client(self) -> RuntimeHttpClient:
        return self._runtime_client


def _interceptors(secret: str) -> list[ProtobufClientInterceptor]:
    return [RuntimeVersionHttpInterceptor("flwr-serverapp"), Secret(secret)]


@contextmanager
def own_grid(
    address: Address, authority: Path | None, secret: str, keys: Mapping[str, bytes]
) -> Iterator[HttpGrid]:
    """Open a run on the SuperLink for exactly the clients with these keys, and yield its Grid.

    keys       public key of each client, by name
    authority  certificate of the authority for TLS; None for a connection without encryption
    secret     secret that the SuperLink requires from the server
    """
    root = authority.read_bytes() if authority else None
    to_server = (str(address), root is None, root)
    with _plain_errors(address):
        control = ControlHttpClient.from_server_address(*to_server, _interceptors(secret))
        _retry(lambda: _open_run(control, keys))
        executor = RuntimeHttpClient.from_server_address(
            *to_server, [*_interceptors(secret), acquire_signature(secret)]
        )
        task = executor.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        executor.close()
        control.close()
        if not task.token:
            raise DpfedError("the SuperLink has no task for its server: see its log")
        grid = OwnGrid(address, root, task.token, secret)
        given = grid.client().PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id = given.task_id
    TaskIdentity.run_id = given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    grid.set_run(run_from_proto(given.run))
    sender = HeartbeatSender(heartbeat(grid.client()))
    sender.start()
    try:
        yield grid
    finally:
        sender.stop()
        with suppress(httpx.HTTPError):
            grid.client().PushTaskOutput(
                PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
            )
        grid.close()


def _open_run(control: ControlHttpClient, keys: Mapping[str, bytes]) -> None:
    for name, key in keys.items():
        control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
    files: dict[str, bytes | Path] = dict(app_files())
    content = build_fab_from_files(files)[0]
    fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    if not control.StartRun(StartRunRequest(fab=fab)).run_id:
        raise DpfedError("the SuperLink did not open a run: see its log")


def _retry(call: Callable[[], None]) -> None:
    """Call `call` until it succeeds, for up to a minute.

    This is needed because a new SuperLink accepts connections before it can reply.
    """
    end = time.monotonic() + RETRY_S
    while True:
        try:
            return call()
        except httpx.TransportError as error:
            if time.monotonic() > end or "certificate" in str(error).lower():
                raise
            time.sleep(0.2)


@contextmanager
def _plain_errors(address: Address) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise DpfedError(
            f"the server cannot speak to its SuperLink at {address}: {error}"
        ) from None

"""Run Flower's SuperLink or SuperNode as a child process that ends with its parent.

    python -m dpfed.federation.flower.child superlink|supernode PARENT_PID ...

A parent ends its children itself unless it is killed. For that case Linux sends a signal at once,
and elsewhere a thread checks the parent every second.

Flower serves clients and administration on one port, where anyone could register keys or stop the
run. This SuperLink is open to clients only; every other path needs the server's secret.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PDEATHSIG = 1
SECRET_VARIABLE = "DPFED_LINK_SECRET"
SECRET_HEADER = "x-dpfed-secret"
OPEN_PATHS = ("/v1/fleet/", "/health")
# Largest request in bytes; Flower splits the messages of clients into pieces of 5 MiB.
MAX_REQUEST = 32 << 20
# Allowed difference of clocks in seconds; TLS already protects the signature that depends on it.
CLOCK_TOLERANCE_S = 900
# Flower's default is 30, its minimum 10.
HEARTBEAT_S = 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def end_with(parent: int) -> None:
    """End this process as soon as its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    # The parent may have ended before the first line of this process.
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


class Guard:
    """An ASGI application that requires the secret for all paths but those of clients."""

    def __init__(self, app: AsgiApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            status = self._refusal(str(scope["path"]), dict(scope["headers"]))
            if not status:
                await self._app(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> int:
        """Return the HTTP status of a refused request, or 0."""
        if not path.startswith(OPEN_PATHS) or ".." in path:
            secret = headers.get(SECRET_HEADER.encode(), b"")
            return 0 if hmac.compare_digest(secret, self._secret) else 404
        length = headers.get(b"content-length", b"0")
        long = not length.isdigit() or int(length) > MAX_REQUEST or b"transfer-encoding" in headers
        return 413 if long else 0


def superlink(secret: str) -> None:
    """Run Flower's SuperLink with its own arguments behind the guard."""
    import uvicorn
    from flwr.superlink.routers.fleet import node_auth

    vars(node_auth)["SYSTEM_TIME_TOLERANCE"] = CLOCK_TOLERANCE_S
    run = uvicorn.run

    def guarded(app: Any, **options: Any) -> None:
        run(app=Guard(app, secret), **options)

    uvicorn.run = guarded
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


def supernode() -> None:
    from flwr.supernode import fleet_http_connection

    # A SuperLink refuses the key of a killed client until two heartbeats were missed.
    vars(fleet_http_connection)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT_S
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


def main() -> None:
    kind = sys.argv[1]
    end_with(int(sys.argv[2]))
    sys.argv = [f"flower-{kind}", *sys.argv[3:]]
    if kind == "superlink":
        superlink(os.environ.pop(SECRET_VARIABLE))
    else:
        supernode()


if __name__ == "__main__":
    main()

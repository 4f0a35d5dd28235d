"""Run Flower's SuperLink or SuperNode as a child process that ends with its parent.

    python -m dpfed.federation.flower.child superlink|supernode PARENT_PID ...

A parent normally ends its children itself. If the parent is killed, Linux kills the child at once.
On other systems a thread of the child checks every second that the parent still runs.

Flower's SuperLink serves clients and administration on one port. Anyone who reaches the port could
register keys or stop the run. Here, only the URL paths that clients use are open. Every other path
needs the server's secret.
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
# Largest HTTP request in bytes. Flower splits larger messages into pieces of 5 MiB.
MAX_REQUEST = 32 << 20
# Largest allowed difference between the clocks of server and client, in seconds. A large value is
# safe: TLS encrypts the signed requests, so nobody can record one and send it again.
CLOCK_TOLERANCE_S = 900
# Seconds between two heartbeats of a SuperNode. Flower's default is 30, its minimum 10.
HEARTBEAT_S = 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def end_with(parent: int) -> None:
    """Make this process end as soon as the process with the id `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    # End now if the parent ended while this process was starting.
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


class Guard:
    """An ASGI application that requires the server's secret, except on the paths of clients."""

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
        """Return the HTTP status for a request that is refused, or 0 if it is accepted."""
        if not path.startswith(OPEN_PATHS) or ".." in path:
            secret = headers.get(SECRET_HEADER.encode(), b"")
            return 0 if hmac.compare_digest(secret, self._secret) else 404
        length = headers.get(b"content-length", b"0")
        long = not length.isdigit() or int(length) > MAX_REQUEST or b"transfer-encoding" in headers
        return 413 if long else 0


def superlink(secret: str) -> None:
    """Run Flower's SuperLink behind `Guard`, with the arguments in `sys.argv`."""
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

    # If a client is killed and restarted, the SuperLink refuses its key until two heartbeats were
    # missed. With short intervals, this wait is short.
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

"""`python -m dpfed.federation.flower.child superlink|supernode PARENT ...`: Flower's process, ended with its parent.

The parent ends its children on every way out; this is for the one way on which it cannot, being killed. On Linux the
kernel sends the signal at once, and a thread looks every second wherever that does not work.

A SuperLink here serves clients to everyone, and everything else only to whoever holds the secret: Flower has one port
for all of it, where anyone could otherwise register keys, stop the run, or start one of their own.
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
LARGEST = 32 << 20  # bytes of one request; Flower cuts what clients send into pieces of 5 MiB
CLOCKS = 900  # seconds by which a client's clock may differ; what Flower compares it with is inside TLS anyway

HEARTBEAT = 10  # seconds; Flower's own is 30, and it takes no less than 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Served = Callable[[Scope, Receive, Send], Awaitable[None]]


def end_with(parent: int) -> None:
    """This process ends when its parent has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    if os.getppid() != parent:  # it was gone before the first line here
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


class Guard:
    """An ASGI application in front of the SuperLink's: what is not for clients needs the secret."""

    def __init__(self, app: Served, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

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
        """The status that a request is turned away with, 0 for none."""
        if not path.startswith(OPEN_PATHS) or ".." in path:
            return (
                0
                if hmac.compare_digest(headers.get(SECRET_HEADER.encode(), b""), self._secret)
                else 404
            )
        length = headers.get(b"content-length", b"0")
        long = not length.isdigit() or int(length) > LARGEST or b"transfer-encoding" in headers
        return 413 if long else 0


def superlink(secret: str) -> None:
    """Flower's own SuperLink by its own arguments, with the guard in front."""
    import uvicorn
    from flwr.superlink.routers.fleet import node_auth

    vars(node_auth)["SYSTEM_TIME_TOLERANCE"] = CLOCKS
    run = uvicorn.run

    def guarded(app: Any, **options: Any) -> None:
        run(app=Guard(app, secret), **options)

    uvicorn.run = guarded
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


def supernode() -> None:
    from flwr.supernode import fleet_http_connection

    # A SuperLink keeps the place of a client that was killed for two of these, and lets nobody in by its key until then.
    vars(fleet_http_connection)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


def main() -> None:
    kind, parent = sys.argv[1], int(sys.argv[2])
    end_with(parent)
    sys.argv = [f"flower-{kind}", *sys.argv[3:]]
    if kind == "superlink":
        superlink(os.environ.pop(SECRET_VARIABLE))
    else:
        supernode()


if __name__ == "__main__":
    main()

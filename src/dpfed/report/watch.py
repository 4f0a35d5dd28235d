"""The page of runs that go on, served to this machine alone.

It answers two addresses, the page and its news, to whoever asks for this machine by its own name: a page of another
site that had its name point here (DNS rebinding) asks by that name and is refused.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from dpfed.errors import DpfedError
from dpfed.report.page import body, plain_figures, read_report, render
from dpfed.training.callbacks.diagnostics import FILE as DIAGNOSTICS
from dpfed.training.run_folder.files import CONFIG, METRICS, RESULT

HOST = "127.0.0.1"
TRACES = (CONFIG, METRICS, RESULT, DIAGNOSTICS, "table.json")


class Source:
    """The page of some folders, made anew when one of their files has changed."""

    def __init__(self, folders: Sequence[Path], public: bool) -> None:
        self._folders, self._public, self._lock = folders, public, threading.Lock()
        self._stamp: tuple[object, ...] = ()
        self._report = read_report(folders, public)
        self._fresh()

    def _now(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in (folder / name for folder in self._folders for name in TRACES):
            try:
                stat = path.stat()
                found.append((str(path), stat.st_mtime_ns, stat.st_size))
            except OSError:
                continue
        return tuple(found)

    def _fresh(self) -> str:
        """The version of what is there now."""
        now = self._now()
        if now != self._stamp:
            try:
                self._report = read_report(self._folders, self._public)
                self._stamp = now
            except DpfedError:  # a file is just being replaced: the next question finds it
                pass
        return hashlib.sha256(repr(self._stamp).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        with self._lock:
            return render(self._report, self._fresh()).encode()

    def news(self, seen: str) -> bytes | None:
        """What has changed since the version that was seen, or None."""
        with self._lock:
            version = self._fresh()
            if version == seen:
                return None
            inner = f'<main id="main">{body(self._report)}</main>'
            state = {"version": version, "html": inner, "figures": plain_figures(self._report)}
            return json.dumps(state, allow_nan=False).encode()


def handler(source: Source) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "dpfed", ""

        def do_GET(self) -> None:
            here = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"{HOST}:{here}", f"localhost:{here}"):
                return self._answer(403, b"this page is for this machine only", "text/plain")
            asked = urlsplit(self.path)
            if asked.path == "/":
                return self._answer(200, source.page(), "text/html; charset=utf-8")
            if asked.path == "/state.json":
                news = source.news(parse_qs(asked.query).get("seen", [""])[0])
                return (
                    self._answer(204, b"", "text/plain")
                    if news is None
                    else self._answer(200, news, "application/json")
                )
            return self._answer(404, b"there is nothing here", "text/plain")

        def _answer(self, status: int, content: bytes, kind: str) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("X-Frame-Options", "DENY")
                self.send_header("Cross-Origin-Resource-Policy", "same-origin")
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:  # whoever asked has gone
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line for every question would bury the address."""

    return Handler


def open_server(folders: Sequence[Path], public: bool, port: int) -> ThreadingHTTPServer:
    source = Source(folders, public)
    try:
        server = ThreadingHTTPServer((HOST, port), handler(source))
    except OSError as error:
        raise DpfedError(
            f"port {port} cannot be used ({error.strerror or error}): choose another --port, or 0"
        ) from None
    server.daemon_threads = True
    return server


def serve(folders: Sequence[Path], public: bool, port: int, told: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    with open_server(folders, public, port) as server:
        told(f"http://{HOST}:{server.server_address[1]}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return

"""Serve the report page of runs in progress over HTTP, to browsers on this machine only.

The server answers two addresses: `/` with the page, and `/state.json` with the page's contents if
they have changed. It refuses requests whose Host header names another machine. Without this check,
a web page of another site could read the contents (DNS rebinding).
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
from dpfed.federation.server.status import status_file
from dpfed.report.page import Report, body, plain_figures, render
from dpfed.training.callbacks.diagnostics import FILE as DIAGNOSTICS
from dpfed.training.run_folder.files import CONFIG, METRICS, RESULT

HOST = "127.0.0.1"
WATCHED_FILES = (CONFIG, METRICS, RESULT, DIAGNOSTICS, "table.json")


class LivePage:
    """The report page of several folders, which is built again when a file in them has changed."""

    def __init__(self, folders: Sequence[Path], read: Callable[[], Report]) -> None:
        self._folders = folders
        self._read = read
        self._lock = threading.Lock()
        # Take the time stamps before the files are read. If a file changes in between, its new
        # stamp differs and the next request reads it again.
        self._stamps = self._file_stamps()
        self._report = read()

    def _file_stamps(self) -> list[tuple[str, int, int]]:
        """Return (path, modification time, size) of each file that the page is built from."""
        found = []
        names = [folder / name for folder in self._folders for name in WATCHED_FILES]
        for path in [*names, *map(status_file, self._folders)]:
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
        return found

    def _refresh(self) -> str:
        """Build the page again if a file has changed. Return its version, a hash of time stamps."""
        stamps = self._file_stamps()
        if stamps != self._stamps:
            try:
                self._report = self._read()
                self._stamps = stamps
            except DpfedError:
                # A run may be writing a file at this moment. Keep the old page until the next
                # request, which reads the file again.
                pass
        return hashlib.sha256(repr(self._stamps).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        with self._lock:
            version = self._refresh()
            return render(self._report, version).encode()

    def changes(self, seen: str) -> bytes | None:
        """Return the contents of the page as JSON, or None if `seen` is still the page's version.

        seen  the version that the browser shows
        """
        with self._lock:
            version = self._refresh()
            if version == seen:
                return None
            html = f'<main id="main">{body(self._report)}</main>'
            state = {"version": version, "html": html, "figures": plain_figures(self._report)}
            return json.dumps(state, allow_nan=False).encode()


def handler(live: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "dpfed"
        sys_version = ""

        def do_GET(self) -> None:
            port = self.connection.getsockname()[1]
            asked = urlsplit(self.path)
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                self._answer(403, b"this page is for this machine only", "text/plain")
            elif asked.path == "/":
                self._answer(200, live.page(), "text/html; charset=utf-8")
            elif asked.path != "/state.json":
                self._answer(404, b"there is nothing here", "text/plain")
            elif changes := live.changes(parse_qs(asked.query).get("seen", [""])[0]):
                self._answer(200, changes, "application/json")
            else:
                self._answer(204, b"", "text/plain")

        def _answer(self, status: int, content: bytes, kind: str) -> None:
            headers = {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Cross-Origin-Resource-Policy": "same-origin",
            }
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:
                # The browser has closed the connection.
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: request lines would push the page's address out of the terminal."""

    return Handler


def open_server(
    folders: Sequence[Path], port: int, read: Callable[[], Report]
) -> ThreadingHTTPServer:
    live = LivePage(folders, read)
    try:
        server = ThreadingHTTPServer((HOST, port), handler(live))
    except OSError as error:
        raise DpfedError(
            f"port {port} cannot be used ({error.strerror or error}): choose another --port, or 0"
        ) from None
    server.daemon_threads = True
    return server


def serve(
    folders: Sequence[Path],
    port: int,
    read: Callable[[], Report],
    on_start: Callable[[str], None],
) -> None:
    """Serve the live page of runs in `folders` until Ctrl-C.

    read      builds the report again after a file has changed
    on_start  called with the address of the page
    """
    with open_server(folders, port, read) as server:
        on_start(f"http://{HOST}:{server.server_address[1]}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return

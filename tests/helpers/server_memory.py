"""Measure a server's memory in one round: `python server_memory.py CLIENTS MEGABYTES FOLDER`.

Each client sends and receives one vector of so many MB (float32). The server's own code sends the
requests through a second process, which stands for Flower's ServerApp, and averages the replies.
The clients are functions: a reply is put together from a file when the transport fetches it. One
JSON object with the memory of both processes is printed.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr.app
import torch
from flwr.app import RecordDict

from dpfed.config import build
from dpfed.federation.flower.envelope import envelope, opened
from dpfed.federation.flower.header import NONCE
from dpfed.federation.flower.post import RelayPost, serve_grid
from dpfed.federation.flower.relay import private_path
from dpfed.federation.flower.transport import PostTransport
from dpfed.federation.messages import Receipt, Reply, digest, pack, unpack_request
from dpfed.federation.server.server import federation_of, served
from dpfed.registry import registry
from dpfed.training.job.job import Job, prepare_server
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate

CLASSES = 10


def memory_mb(field: str) -> float:
    """Return VmRSS, the memory now, or VmHWM, the most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def reset_peak() -> float:
    """Return the memory now; VmHWM counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


class Grid:
    """A Grid whose clients all reply, each with the numbers of one file."""

    def __init__(self, count: int, body: Path) -> None:
        self._nodes = [
            SimpleNamespace(node_id=100 + i, public_key=key_of(i), last_activated_at="1")
            for i in range(count)
        ]
        self._body = body
        # Receipt, nonce and node of each request, by message id.
        self._requests: dict[str, tuple[Receipt, str, int]] = {}
        self._lock = threading.Lock()
        self._pulling = 0
        self.most_pulling = 0

    def get_nodes(self) -> list[Any]:
        return self._nodes

    def push_messages(self, messages: list[Any]) -> list[str]:
        (message,) = messages
        header, data = opened(message.content)
        terms = unpack_request(data or b"", 1 << 40).terms
        receipt = Receipt(terms.run, terms.client, terms.round, digest(data or b""), 1, "ab")
        key = f"m{message.node}"
        self._requests[key] = (receipt, header[NONCE], message.node)
        return [key]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        (key,) = ids
        if key not in self._requests:
            return []
        with self._lock:
            self._pulling += 1
            self.most_pulling = max(self.most_pulling, self._pulling)
        receipt, nonce, node = self._requests.pop(key)
        time.sleep(0.05)
        content = envelope({NONCE: nonce}, self._reply(receipt))
        metadata = SimpleNamespace(reply_to_message_id=key, src_node_id=node)
        with self._lock:
            self._pulling -= 1
        return [SimpleNamespace(metadata=metadata, has_error=lambda: False, content=content)]

    def _reply(self, receipt: Receipt) -> bytes:
        """Return the bytes of a reply, whose numbers come from the file."""
        small = pack(Reply(receipt, {"delta": torch.zeros(1)}))
        header = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])
        size = self._body.stat().st_size
        header["delta"] |= {"shape": [size // 4], "data_offsets": [0, size]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with self._body.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as map:
            return b"".join([struct.pack("<Q", len(text)), text, map])


def unsent_message(content: RecordDict, node: int, kind: str, ttl: float) -> SimpleNamespace:
    """Return a stand-in for Flower's Message, which only Flower's own processes can make."""
    return SimpleNamespace(content=content, node=node)


def serve_app(path: str, count: int, body: Path, out: Path) -> None:
    """Do the work of the ServerApp's process, and write its memory to the file `out`."""
    flwr.app.Message = unsent_message  # type: ignore[assignment,misc]
    grid: Any = Grid(count, body)
    idle = reset_peak()
    serve_grid(grid, path)
    above = round(memory_mb("VmHWM") - idle)
    out.write_text(json.dumps({"app_above_idle_mb": above, "pulls_at_once": grid.most_pulling}))


def key_of(client: int) -> bytes:
    return f"key {client}".encode()


def job_of(clients: int, megabytes: int) -> Job:
    raw: dict[str, Any] = {
        "data": {"name": "npz", "clients": clients, "classes": CLASSES},
        "model": {"name": "linear", "liveness": False},
        "algorithm": {"name": "dp-fedavg", "lr": 0.1},
        "privacy": {"sigma": 1.0, "batch": 10},
        "run": {"rounds": 1, "local_steps": 1, "participation": 1.0, "device": "cpu"},
        "federation": {
            "clients": {f"clinic-{i:02}": 100 for i in range(clients)},
            "timeout": 300.0,
            "test_set": False,
            "kind": "features",
            "shape": [megabytes * 10**6 // 4 // CLASSES],
            "classes": CLASSES,
        },
    }
    return prepare_server(served(build(raw, registry())))


def main() -> None:
    clients, megabytes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    job = job_of(clients, megabytes)
    body = folder / "body"
    torch.full((job.space.size,), 0.5).numpy().tofile(body)
    keys = {f"clinic-{i:02}": key_of(i) for i in range(clients)}
    log: list[str] = []
    with private_path() as path:
        order = (path, clients, body, folder / "app.json")
        app = multiprocessing.get_context("spawn").Process(target=serve_app, args=order)
        app.start()
        post = RelayPost(path)
        post.wait()
        federation = federation_of(job, "memory", PostTransport(post, keys), log.append, folder)
        state = first_state(job)
        idle = reset_peak()
        mean, answered = federation.run_cohort(1, state, list(range(clients)))
        state = aggregate(job, 1, state, list(range(clients)), mean, answered)
        above = round(memory_mb("VmHWM") - idle)
        post.end()
        app.join(60)
    found = {
        "answered": answered,
        "right": bool(((mean["delta"] - 0.5).abs() < 1e-6).all()),
        "message_mb": 4 * job.space.size / 1e6,
        "idle_mb": round(idle),
        "above_idle_mb": above,
        **json.loads((folder / "app.json").read_text()),
        "log": log,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

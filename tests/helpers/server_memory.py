"""Measure a server's memory in one round: `python server_memory.py CLIENTS MEGABYTES FOLDER`.

Each client sends and receives one vector of so many MB (float32). The server's own code sends the
requests through its Grid transport and averages the replies. The clients are functions: a reply is
put together from a file when the transport fetches it. One JSON object is printed.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from dpfed.config import build
from dpfed.federation.flower.envelope import NONCE, envelope, header_value, payload_of
from dpfed.federation.flower.transport import GridTransport
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


class Grid:
    """A Grid whose clients all reply, each with the numbers of one file."""

    def __init__(self, count: int, body: Path) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self._nodes = [
            SimpleNamespace(node_id=100 + i, public_key=key_of(i), last_activated_at="1")
            for i in range(count)
        ]
        self._body = body
        self._receipts: dict[str, tuple[Receipt, Message]] = {}
        self._lock = threading.Lock()
        self._pulling = 0
        self.most_pulling = 0

    def get_nodes(self) -> list[Any]:
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            data = payload_of(message.content)
            terms = unpack_request(data, 1 << 40).terms
            receipt = Receipt(terms.run, terms.client, terms.round, digest(data), 1, "ab")
            nonce = header_value(message.content, NONCE)
            # Keep a message of the same metadata and nonce, but without the request's bytes.
            light = Message(envelope(b"", nonce), message.metadata.dst_node_id, "train")
            ids.append(f"m{message.metadata.dst_node_id}")
            light.metadata.__dict__["_message_id"] = ids[-1]
            self._receipts[ids[-1]] = (receipt, light)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        (key,) = ids
        if key not in self._receipts:
            return []
        with self._lock:
            self._pulling += 1
            self.most_pulling = max(self.most_pulling, self._pulling)
        receipt, request = self._receipts.pop(key)
        time.sleep(0.05)
        found = [Message(envelope(self._reply(receipt), nonce_of(request)), reply_to=request)]
        with self._lock:
            self._pulling -= 1
        return found

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


def nonce_of(message: Message) -> str:
    return header_value(message.content, NONCE)


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
    grid: Any = Grid(clients, body)
    log: list[str] = []
    federation = federation_of(job, "memory", GridTransport(grid, keys), log.append, folder)
    state = first_state(job)
    idle = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    mean, answered = federation.run_cohort(1, state, list(range(clients)))
    state = aggregate(job, 1, state, list(range(clients)), mean, answered)
    found = {
        "answered": answered,
        "right": bool(((mean["delta"] - 0.5).abs() < 1e-6).all()),
        "message_mb": 4 * job.space.size / 1e6,
        "idle_mb": round(idle),
        "above_idle_mb": round(memory_mb("VmHWM") - idle),
        "pulls_at_once": grid.most_pulling,
        "log": log,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

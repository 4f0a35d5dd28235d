"""The server's messages of one exchange. Memory holds one message at a time.

Requests are packed when they are sent. Replies are checked when they arrive and wait in files until
the mean is computed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.federation.messages import Receipt, Request, ScoringRequest, digest, pack
from dpfed.privacy.ledger.private_files import open_private
from dpfed.training.messages.message_format import SCALE, Layout, decode
from dpfed.training.run_folder.atomic_file import short_errors

PREFIX = "replies-"


class PackedRequests(Mapping[str, bytes]):
    """Requests as bytes, by client name. Each is packed when it is read.

    digests  hash of each request that was read, by client name
    """

    def __init__(self, requests: Mapping[str, Request | ScoringRequest]) -> None:
        self._requests = dict(requests)
        self.digests: dict[str, str] = {}

    def __getitem__(self, name: str) -> bytes:
        data = pack(self._requests[name])
        self.digests[name] = digest(data)
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class StoredReplies:
    """The valid replies of a round: their receipts, and their tensors in files.

    A file holds a reply's bytes as received. An int8 reply thus needs a quarter of the disk space
    of a float32 reply.
    """

    def __init__(self, folder: Path) -> None:
        self.receipts: dict[int, Receipt] = {}
        self._folder = folder

    def put(self, client: int, receipt: Receipt, data: bytes) -> None:
        path = self._path(client)
        with short_errors(path), open_private(path, "wb") as file:
            file.write(data)
        self.receipts[client] = receipt

    def mean(
        self, clients: Sequence[int], weights: Sequence[float], layout: Layout, device: torch.device
    ) -> Message:
        """Return the weighted sum of these clients' tensors, by name.

        The clients are added one after another, in the order given. The order in which the replies
        arrived thus does not change the last bits.
        """
        total = {name: torch.zeros(field.size, device=device) for name, field in layout.items()}
        for client, weight in zip(clients, weights, strict=True):
            for name in layout:
                total[name].add_(self._read(client, name, layout).to(device), alpha=weight)
        return total

    def _read(self, client: int, name: str, layout: Layout) -> Tensor:
        field = {name: layout[name]}
        names = [name, name + SCALE] if layout[name].scales else [name]
        path = self._path(client)
        with short_errors(path, "read"), safe_open(path, framework="pt") as file:
            return decode({found: file.get_tensor(found) for found in names}, field)[name]

    def _path(self, client: int) -> Path:
        return self._folder / f"{client}.safetensors"


@contextmanager
def stored_replies(folder: Path | None) -> Iterator[StoredReplies]:
    """Yield an empty store of replies, whose files are deleted at the end.

    folder  folder in which the files are made; None for the system's folder of temporary files
    """
    with short_errors(folder or Path(tempfile.gettempdir())):
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    try:
        yield StoredReplies(own)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def delete_leftovers(folder: Path) -> None:
    """Delete the files of replies that a killed server has left behind."""
    for old in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)

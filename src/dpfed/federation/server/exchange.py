"""The server's requests of a round and the clients' replies, with one message in memory at a time.

Requests are converted to bytes when they are sent. Replies are checked when they arrive, and are
stored in files until their mean is computed.
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
    """Requests as bytes, by client name; a request is converted to bytes only when it is looked up.

    digests  hash of each request that was looked up, by client name
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
    """The valid replies of a round. Their tensors are in files, not in memory.

    A file has the bytes as received, so an int8 reply needs little disk space.

    receipts  the fields of each reply except its tensors, by client number
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
        """Return the weighted sum of the tensors in these clients' replies, by tensor name.

        The sum adds the clients in the order given. Therefore, its last bits do not depend on the
        order in which the replies arrived.

        layout  formats and lengths of the tensors, by name
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
    """Yield an empty `StoredReplies`, whose files are deleted when the context ends.

    folder  folder in which the files are made; None for the system's folder of temporary files
    """
    with short_errors(folder or Path(tempfile.gettempdir())):
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    try:
        yield StoredReplies(own)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def delete_leftovers(folder: Path) -> None:
    """Delete the reply files that a killed server has left in `folder`."""
    for old in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)

"""Store the client memory of simulations, such as SCAFFOLD's control variates, between rounds.

Only clients that took part have an entry. If the entries in RAM exceed a limit, the oldest ones
move to files, which are memory-mapped when needed. A file is never overwritten, because a
checkpoint may refer to it: its name contains the round that wrote it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dpfed.algorithms.base import ClientState
from dpfed.errors import DpfedError
from dpfed.training.run_folder.atomic_file import write_file


@dataclass(frozen=True)
class Entry:
    """The name of the file with one client's vectors, and the SHA-256 of this file."""

    file: str
    sha256: str


class ClientStates:
    """The stored vectors of all clients that took part.

    names   names of the vectors that each client stores
    size    length P of each vector
    folder  folder for the files
    limit   largest number of bytes to keep in memory
    """

    def __init__(self, names: Sequence[str], size: int, folder: Path, limit: int) -> None:
        self._names = tuple(names)
        self._size = size
        self._folder = folder
        self._limit = limit
        # Vectors of each client, `[names, P]`, ordered by the time when they were stored.
        self._in_memory: OrderedDict[int, np.ndarray] = OrderedDict()
        self._files: dict[int, Entry] = {}
        # The round in which each client's vectors were stored last.
        self._written_in: dict[int, int] = {}
        self._changed: set[int] = set()
        # Names of the files that must be kept, because a checkpoint may refer to them.
        self._referenced: set[str] = set()
        # A lock is needed, because another thread writes a checkpoint while the next round runs.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._in_memory.keys() | self._files.keys())

    @property
    def bytes_in_memory(self) -> int:
        return len(self._in_memory) * len(self._names) * self._size * 4

    def gather(self, clients: Sequence[int], device: torch.device) -> ClientState:
        """Return a dict of these clients' vectors, `[S, P]` per name, and the mask `seen`, `[S]`.

        `seen` is False for clients without stored vectors, whose rows are zero. The dict is empty
        if the algorithm keeps no client memory.
        """
        if not self._names:
            return {}
        with self._lock:
            seen = torch.tensor([i in self._in_memory or i in self._files for i in clients])
            rows = np.stack([self._of(i) for i in clients])
        stacked = torch.from_numpy(rows).to(device)
        return {name: stacked[:, j] for j, name in enumerate(self._names)} | {
            "seen": seen.to(device)
        }

    def put(self, t: int, clients: Sequence[int], memory: ClientState) -> None:
        """Store the vectors `[S, P]` that the algorithm's `finish` returned in round t."""
        if set(memory) != set(self._names):
            raise ValueError(f"the algorithm remembers {self._names} and gave back {tuple(memory)}")
        if not self._names:
            return
        rows = (
            torch.stack([memory[name] for name in self._names], dim=1)
            .detach()
            .float()
            .cpu()
            .numpy()
        )
        with self._lock:
            for client, row in zip(clients, rows, strict=True):
                # Store a new array, because a checkpoint thread may still read the old array.
                self._in_memory[client] = row.copy()
                self._in_memory.move_to_end(client)
                self._written_in[client] = t
                self._changed.add(client)
            while self.bytes_in_memory > self._limit and len(self._in_memory) > 1:
                self._spill()

    def save(self) -> dict[int, Entry]:
        """Write the vectors that changed since the last call; return the entry of each client."""
        return self.begin_save()()

    def begin_save(self) -> Callable[[], dict[int, Entry]]:
        """Return a function that writes the present vectors and returns the entry of each client.

        The function may run on another thread. It does not write vectors stored after this call.
        """
        with self._lock:
            changed = {
                i: (self._written_in[i], self._in_memory[i])
                for i in sorted(self._changed & self._in_memory.keys())
            }
            before = dict(self._files)
            self._referenced |= {entry.file for entry in before.values()} | {
                _file(i, t) for i, (t, _) in changed.items()
            }

        def write() -> dict[int, Entry]:
            return {
                **before,
                **{i: self._write_unless_spilled(i, t, row) for i, (t, row) in changed.items()},
            }

        return write

    def _write_unless_spilled(self, client: int, t: int, row: np.ndarray) -> Entry:
        with self._lock:
            spilled = self._files.get(client)
            if spilled is not None and spilled.file == _file(client, t):
                return spilled
            entry = self._write(client, t, row)
            # Register the file only if no later round has stored newer vectors of this client.
            if self._written_in[client] == t:
                self._files[client] = entry
                self._changed.discard(client)
            return entry

    def prune(self, wanted: set[str]) -> None:
        """Delete all files except those in `wanted` and the newest file of each client."""
        with self._lock:
            wanted = wanted | {entry.file for entry in self._files.values()}
            self._referenced &= wanted
            if self._folder.is_dir():
                for path in self._folder.iterdir():
                    if path.name not in wanted:
                        path.unlink(missing_ok=True)

    def restore(self, entries: Mapping[int, Entry]) -> None:
        """Replace all stored vectors by those in the files that `save` returned.

        Raise DpfedError if a file is missing or has another hash.
        """
        for client, entry in entries.items():
            path = self._folder / Path(entry.file).name
            try:
                good = hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
            except OSError:
                good = False
            if not good:
                raise DpfedError(
                    f"{path} is missing or damaged: the memory of client {client} is lost"
                )
        self._in_memory.clear()
        self._changed.clear()
        self._files = dict(entries)
        self._referenced = {entry.file for entry in entries.values()}

    def _of(self, client: int) -> np.ndarray:
        if client in self._in_memory:
            return self._in_memory[client]
        if client not in self._files:
            return np.zeros((len(self._names), self._size), dtype=np.float32)
        path = self._folder / self._files[client].file
        try:
            mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if mapped.shape != (len(self._names), self._size) or mapped.dtype != np.float32:
                raise ValueError
        # Catch every error, because NumPy raises many types for a damaged file, even TokenError.
        except Exception:
            raise DpfedError(
                f"{path} is missing or damaged: the memory of client {client} is lost"
            ) from None
        return mapped

    def _spill(self) -> None:
        client = next(iter(self._in_memory))
        if client in self._changed or client not in self._files:
            old = self._files.get(client)
            self._files[client] = self._write(
                client, self._written_in[client], self._in_memory[client]
            )
            self._changed.discard(client)
            if old is not None and old.file not in self._referenced | {self._files[client].file}:
                # Delete the old file, because no checkpoint refers to it.
                (self._folder / old.file).unlink(missing_ok=True)
        del self._in_memory[client]

    def _write(self, client: int, t: int, row: np.ndarray) -> Entry:
        name = _file(client, t)
        return Entry(name, write_file(self._folder / name, lambda file: np.save(file, row)))


def _file(client: int, t: int) -> str:
    return f"client-{client}.round-{t}.npy"

"""Store the vectors that simulated clients keep between rounds, such as control variates.

Only clients that took part have an entry. If the entries in RAM exceed a limit, the oldest ones
move to files, which are memory-mapped when needed. A file is never overwritten, because a
checkpoint may refer to it. Its name contains the round that wrote it.
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
    """One client's file of stored vectors: its name, and the SHA-256 of its content."""

    file: str
    sha256: str


class ClientStates:
    """The vectors that clients have stored for their next round, in RAM and in files.

    names   names of the vectors that each client stores
    size    length P of each vector, the number of trainable parameters
    folder  folder for the files
    limit   largest number of bytes to keep in RAM
    """

    def __init__(self, names: Sequence[str], size: int, folder: Path, limit: int) -> None:
        self._names = tuple(names)
        self._size = size
        self._folder = folder
        self._limit = limit
        # The vectors of each client, `[names, P]`, in the order of storing. If they need too much
        # memory, the first ones move to files.
        self._in_memory: OrderedDict[int, np.ndarray] = OrderedDict()
        self._files: dict[int, Entry] = {}
        # The round in which each client's vectors were last stored, by client.
        self._written_in: dict[int, int] = {}
        self._changed: set[int] = set()
        # Names of the files to which a checkpoint may refer. They must not be deleted.
        self._referenced: set[str] = set()
        # The lock protects the entries, because another thread writes a checkpoint while the next
        # round stores new vectors.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._in_memory.keys() | self._files.keys())

    @property
    def bytes_in_memory(self) -> int:
        return len(self._in_memory) * len(self._names) * self._size * 4

    def gather(self, clients: Sequence[int], device: torch.device) -> ClientState:
        """Return the stored vectors of S clients by name, `[S, P]` each, and a mask `seen`, `[S]`.

        `seen` is False for clients without stored vectors, whose rows are zero. The dict is empty
        if the clients of this algorithm store no vectors.
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
        """Store the vectors, `[S, P]` per name, that S clients keep after round t.

        memory  the vectors by name, as the algorithm's `finish` returned them
        """
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
                # Store a copy and do not overwrite the old array: another thread may be writing it
                # to a checkpoint.
                self._in_memory[client] = row.copy()
                self._in_memory.move_to_end(client)
                self._written_in[client] = t
                self._changed.add(client)
            while self.bytes_in_memory > self._limit and len(self._in_memory) > 1:
                self._spill()

    def save(self) -> dict[int, Entry]:
        """Write the vectors that changed since the last call; return each client's file entry."""
        return self.begin_save()()

    def begin_save(self) -> Callable[[], dict[int, Entry]]:
        """Return a function that writes the present vectors and returns each client's file entry.

        The function may run on another thread. It ignores vectors that are stored after this call.
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
            # A later round may have stored newer vectors while this thread wrote the file. Then
            # this file is out of date, so do not register it.
            if self._written_in[client] == t:
                self._files[client] = entry
                self._changed.discard(client)
            return entry

    def prune(self, wanted: set[str]) -> None:
        """Delete all files except those named in `wanted` and the newest file of each client."""
        with self._lock:
            wanted = wanted | {entry.file for entry in self._files.values()}
            self._referenced &= wanted
            if self._folder.is_dir():
                for path in self._folder.iterdir():
                    if path.name not in wanted:
                        path.unlink(missing_ok=True)

    def restore(self, entries: Mapping[int, Entry]) -> None:
        """Replace all stored vectors by those in the given files, when a run is resumed.

        Raise DpfedError if a file is missing or its content has another hash.

        entries  file entry of each client, as `save` returned it
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
        # Catch all errors: for a damaged file NumPy raises many types of errors, even TokenError.
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
                # No checkpoint refers to the client's older file, so delete it.
                (self._folder / old.file).unlink(missing_ok=True)
        del self._in_memory[client]

    def _write(self, client: int, t: int, row: np.ndarray) -> Entry:
        name = _file(client, t)
        return Entry(name, write_file(self._folder / name, lambda file: np.save(file, row)))


def _file(client: int, t: int) -> str:
    return f"client-{client}.round-{t}.npy"

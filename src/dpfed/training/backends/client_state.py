"""What simulated clients keep for themselves between rounds (SCAFFOLD's control, FAFED's previous iterate).

Only clients that took part have an entry. Entries live in memory up to a limit; the ones used longest ago then move to
files that are memory-mapped when they are needed again. A file is never overwritten: its name carries the round that made
it, so that a checkpoint may point at it until the next checkpoint is complete.
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
    """One client's vectors in a file: where, and what its bytes hash to."""

    file: str
    sha256: str


class ClientStates:
    """`names` vectors of `size` numbers for each client that took part."""

    def __init__(self, names: Sequence[str], size: int, folder: Path, limit: int) -> None:
        self._names, self._size, self._folder, self._limit = tuple(names), size, folder, limit
        self._held: OrderedDict[int, np.ndarray] = (
            OrderedDict()
        )  # the one used longest ago comes first
        self._files: dict[int, Entry] = {}
        self._made: dict[int, int] = {}  # the round that made what is held
        self._changed: set[int] = set()
        self._named: set[str] = set()  # files that a checkpoint may point at
        self._lock = threading.RLock()  # a checkpoint is written while the next round goes on

    def __len__(self) -> int:
        return len(self._held.keys() | self._files.keys())

    @property
    def held_bytes(self) -> int:
        return len(self._held) * len(self._names) * self._size * 4

    def gather(self, clients: Sequence[int], device: torch.device) -> ClientState:
        """The vectors of these clients, stacked `[S, P]`, with `seen`; `{}` for algorithms that remember nothing."""
        if not self._names:
            return {}
        with self._lock:
            seen = torch.tensor([i in self._held or i in self._files for i in clients])
            rows = np.stack([self._of(i) for i in clients])
        stacked = torch.from_numpy(rows).to(device)
        return {name: stacked[:, j] for j, name in enumerate(self._names)} | {
            "seen": seen.to(device)
        }

    def put(self, t: int, clients: Sequence[int], memory: ClientState) -> None:
        """Keeps what `finish` gave back in round t."""
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
                self._held[client] = (
                    row.copy()
                )  # replaced, never changed: a checkpoint may still be reading the old one
                self._held.move_to_end(client)
                self._made[client] = t
                self._changed.add(client)
            while self.held_bytes > self._limit and len(self._held) > 1:
                self._spill()

    def save(self) -> dict[int, Entry]:
        """Writes the clients that changed since the last call; returns where every client's vectors are."""
        return self.begin_save()()

    def begin_save(self) -> Callable[[], dict[int, Entry]]:
        """`save` of what is held now; the writing is done by the call of what it returns, on any thread, before the next."""
        with self._lock:
            changed = {
                i: (self._made[i], self._held[i]) for i in sorted(self._changed & self._held.keys())
            }
            before = dict(self._files)
            self._named |= {entry.file for entry in before.values()} | {
                _file(i, t) for i, (t, _) in changed.items()
            }

        def write() -> dict[int, Entry]:
            return {**before, **{i: self._keep(i, t, row) for i, (t, row) in changed.items()}}

        return write

    def _keep(self, client: int, t: int, row: np.ndarray) -> Entry:
        """Until it is written it counts as changed: spilled in the meantime, it is in its file already."""
        with self._lock:
            held = self._files.get(client)
            if held is not None and held.file == _file(client, t):
                return held
            entry = self._write(client, t, row)
            if self._made[client] == t:  # else it has changed since
                self._files[client] = entry
                self._changed.discard(client)
            return entry

    def prune(self, wanted: set[str]) -> None:
        """Removes files that neither a checkpoint that is kept nor a client's newest entry names."""
        with self._lock:
            wanted = wanted | {entry.file for entry in self._files.values()}
            self._named &= wanted
            if self._folder.is_dir():
                for path in self._folder.iterdir():
                    if path.name not in wanted:
                        path.unlink(missing_ok=True)

    def restore(self, entries: Mapping[int, Entry]) -> None:
        """Takes up what `save` returned, after checking every file."""
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
        self._held.clear()
        self._changed.clear()
        self._files = dict(entries)
        self._named = {entry.file for entry in entries.values()}

    def _of(self, client: int) -> np.ndarray:
        if client in self._held:
            return self._held[client]
        if client not in self._files:
            return np.zeros((len(self._names), self._size), dtype=np.float32)
        path = self._folder / self._files[client].file
        try:
            mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if mapped.shape != (len(self._names), self._size) or mapped.dtype != np.float32:
                raise ValueError
        except (
            Exception
        ):  # for bytes that are no array NumPy raises a dozen kinds, down to TokenError
            raise DpfedError(
                f"{path} is missing or damaged: the memory of client {client} is lost"
            ) from None
        return mapped

    def _spill(self) -> None:
        client = next(iter(self._held))
        if client in self._changed or client not in self._files:
            old = self._files.get(client)
            self._files[client] = self._write(client, self._made[client], self._held[client])
            self._changed.discard(client)
            if old is not None and old.file not in self._named | {self._files[client].file}:
                (self._folder / old.file).unlink(
                    missing_ok=True
                )  # spilled since the last checkpoint: nobody's any more
        del self._held[client]

    def _write(self, client: int, t: int, row: np.ndarray) -> Entry:
        name = _file(client, t)
        return Entry(name, write_file(self._folder / name, lambda file: np.save(file, row)))


def _file(client: int, t: int) -> str:
    return f"client-{client}.round-{t}.npy"

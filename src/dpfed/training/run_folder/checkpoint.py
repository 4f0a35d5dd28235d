"""Checkpoints: enough to go on after any interruption with bitwise the same run.

    checkpoint/round-12.json            how far the run is; names and SHA-256 of everything below, and of itself
    checkpoint/round-12.safetensors     the server's state
    checkpoint/memory/client-3.round-9.npy   what client 3 keeps for itself, since round 9

Every file is written beside, synced and renamed, and the JSON comes last, so a checkpoint is complete or not there. The
last two are kept; of the clients' memory only what changed is written. Random streams have no position to store: they
are named by round and client. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.training.backends.client_state import ClientStates, Entry
from dpfed.training.rounds import Progress
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.server_state import State

FORMAT = 1
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    MemoryError,
    RecursionError,
    SafetensorError,
)
KEPT = 2  # a damaged newest checkpoint leaves the one before it


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read back and verified.

    taken    rounds each client took part in
    backend  what the backend knows besides the state (`RemoteBackend.after`)
    """

    progress: Progress
    taken: np.ndarray
    memory: dict[int, Entry]
    backend: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, in `folder`; `job` is a hash of what must not change between them."""

    def __init__(self, folder: Path, job: str, memory: ClientStates) -> None:
        self._folder, self._job, self._memory = folder, job, memory
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="dpfed-checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def save(
        self, progress: Progress, taken: np.ndarray, backend: dict[str, Any] | None = None
    ) -> None:
        """On disk when it returns."""
        self.save_beside(progress, taken, backend, wait=True)

    def save_beside(
        self,
        progress: Progress,
        taken: np.ndarray,
        backend: dict[str, Any] | None = None,
        first: Callable[[], None] = lambda: None,
        wait: bool = False,
    ) -> None:
        """`save` of how things are now, after `first`, written while the run goes on: one at a time, and what went wrong
        with the one before is raised here."""
        self.wait()
        # Copies, because two fields of a state may be the same tensor, which safetensors refuses.
        state = {
            k: v.detach().cpu().contiguous().clone() for k, v in progress.state.tensors().items()
        }
        memory, taken = self._memory.begin_save(), taken.copy()

        def write() -> None:
            first()
            self._write(progress, state, memory(), taken, backend)

        self._writing = self._beside.submit(write)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self,
        progress: Progress,
        state: dict[str, Tensor],
        memory: dict[int, Entry],
        taken: np.ndarray,
        backend: dict[str, Any] | None,
    ) -> None:
        name, blob = f"round-{progress.t}", save_tensors(state)
        digest = write_file(self._folder / f"{name}.safetensors", lambda file: file.write(blob))
        index = {
            "format": FORMAT,
            "job": self._job,
            "round": progress.t,
            "clip": progress.state.clip,
            "seconds": progress.seconds,
            "state": digest,
            "memory": {str(i): [e.file, e.sha256] for i, e in sorted(memory.items())},
            "clients": len(taken),
            "taken": {str(i): int(taken[i]) for i in np.flatnonzero(taken)},
            **({"backend": backend} if backend else {}),
        }
        text = json.dumps({**index, "sha256": _seal(index)}, indent=1)
        write_file(self._folder / f"{name}.json", lambda file: file.write(text.encode()))
        self._forget()

    def load(self, first: State) -> tuple[Saved | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with newer ones; `first` shows the state's form."""
        said: list[str] = []
        for path in self._indexes():
            try:
                saved = self._read(path, first)
                self._memory.restore(saved.memory)
                return saved, said
            except DpfedError as error:
                said.append(str(error))
        return None, said

    def _read(self, path: Path, first: State) -> Saved:
        try:
            index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if index.pop("sha256") != _seal(index) or index["format"] != FORMAT:
                raise ValueError
            blob = path.with_suffix(".safetensors").read_bytes()
            if hashlib.sha256(blob).hexdigest() != index["state"]:
                raise ValueError
            tensors = {name: value.clone() for name, value in load_tensors(blob).items()}
            taken = np.zeros(int(index["clients"]), dtype=np.int64)
            for client, count in index["taken"].items():
                taken[int(client)] = count
            memory = {
                int(i): Entry(Path(file).name, str(sha))
                for i, (file, sha) in index["memory"].items()
            }
            job, clip = index["job"], float(index["clip"])
            t, seconds = int(index["round"]), float(index["seconds"])
            backend = dict(index.get("backend", {}))
        except DAMAGE:
            raise DpfedError(f"the checkpoint {path} is damaged") from None
        if job != self._job:
            raise DpfedError(f"the checkpoint {path} is of another configuration")
        try:
            state = first.with_tensors(tensors, clip)
        except ValueError as error:
            raise DpfedError(
                f"the checkpoint {path} was written by another version of dpfed: {error}"
            ) from None
        return Saved(Progress(t, state, seconds), taken, memory, backend)

    def _indexes(self) -> list[Path]:
        """Newest first."""
        found = [
            p
            for p in self._folder.glob("round-*.json")
            if p.stem.removeprefix("round-").isdecimal()
        ]
        return sorted(found, key=lambda p: -int(p.stem.removeprefix("round-")))

    def _forget(self) -> None:
        """Only the last two checkpoints and the files they name are kept."""
        indexes = self._indexes()
        with suppress(OSError):  # one too many does no harm
            for path in indexes[KEPT:]:
                path.unlink(missing_ok=True)
                path.with_suffix(".safetensors").unlink(missing_ok=True)
        wanted: set[str] = set()
        for path in indexes[:KEPT]:
            try:
                wanted |= {
                    str(file)
                    for file, _ in json.loads(path.read_text(encoding="utf-8"))["memory"].values()
                }
            except DAMAGE:
                return  # a damaged neighbour: better keep too much
        with suppress(OSError):
            self._memory.prune(wanted)


def _seal(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def job_hash(settings: dict[str, Any], theta: torch.Tensor) -> str:
    """A hash of all that the numbers of a run follow from: its settings and its starting point."""
    text = json.dumps(settings, sort_keys=True).encode()
    return hashlib.sha256(text + theta.detach().cpu().numpy().tobytes()).hexdigest()

"""Checkpoints, from which an interrupted run resumes with bitwise identical results.

    checkpoint/round-12.json                 index: round, file names and SHA-256 of all files
    checkpoint/round-12.safetensors          state of the server
    checkpoint/memory/client-3.round-9.npy   memory of client 3, last changed in round 9

The memory of a client has the vectors that an algorithm keeps at the client between rounds. The
index is written last, so a checkpoint is complete or does not exist. The last two checkpoints are
kept. Each round and client has its own random stream, so no state of a random generator is stored.
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

from dpfed.errors import DpfedError
from dpfed.training.backends.client_state import ClientStates, Entry
from dpfed.training.rounds import Progress
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.server_state import State

FORMAT = 1
# Errors that the readers of JSON and tensor files raise if a file is damaged.
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
# Number of checkpoints to keep. If the newest one is damaged, a run can resume from the one before.
CHECKPOINTS_STORED = 2


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and verified.

    progress      the completed rounds and the server's state
    rounds_taken  number of rounds that each client took part in, `[clients]`
    memory        the file of each client's stored vectors, by client
    backend       what a federation server must remember about its clients, which run on other
                  machines (see `RemoteBackend.after`); empty for simulations
    """

    progress: Progress
    rounds_taken: np.ndarray
    memory: dict[int, Entry]
    backend: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """Writes and reads the checkpoints of one run.

    job     hash of the run's settings, from `job_hash`; a checkpoint with another hash is refused
    memory  the store of the vectors that clients keep between rounds
    """

    def __init__(self, folder: Path, job: str, memory: ClientStates) -> None:
        self._folder = folder
        self._job = job
        self._memory = memory
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dpfed-checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def save(
        self,
        progress: Progress,
        rounds_taken: np.ndarray,
        backend: dict[str, Any] | None = None,
        before_write: Callable[[], None] = lambda: None,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint of the present state on another thread, while the run continues.

        progress      the completed rounds and the server's state
        rounds_taken  number of rounds that each client took part in, `[clients]`
        backend       what a federation server must remember about its clients, which run on other
                      machines; None for simulations
        before_write  called on the other thread before it writes the checkpoint
        wait          True: return only after the checkpoint is on disk

        First wait for the previous checkpoint. If it could not be written, raise its error.
        """
        self.wait()
        # Copy all tensors, because safetensors refuses to save one tensor under two names.
        tensors = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in progress.state.tensors().items()
        }
        save_memory = self._memory.begin_save()
        index = {
            "format": FORMAT,
            "job": self._job,
            "round": progress.t,
            "clip": progress.state.clip,
            "seconds": progress.seconds,
            "clients": len(rounds_taken),
            "taken": {str(i): int(rounds_taken[i]) for i in np.flatnonzero(rounds_taken)},
            **({"backend": backend} if backend else {}),
        }

        def write() -> None:
            before_write()
            memory = {str(i): [e.file, e.sha256] for i, e in sorted(save_memory().items())}
            self._write({**index, "memory": memory}, save_tensors(tensors))

        self._writing = self._executor.submit(write)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raise the error if it cannot be written."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _write(self, index: dict[str, Any], blob: bytes) -> None:
        path = self._folder / f"round-{index['round']}.json"
        state = write_file(path.with_suffix(".safetensors"), lambda file: file.write(blob))
        index = {**index, "state": state}
        text = json.dumps({**index, "sha256": index_hash(index)}, indent=1)
        write_file(path, lambda file: file.write(text.encode()))
        self._remove_old()

    def load(self, first: State) -> tuple[LoadedCheckpoint | None, list[str]]:
        """Return (newest complete checkpoint or None, errors of newer damaged checkpoints).

        This method also restores the clients' stored vectors from the checkpoint.

        first  the server's state before round 1; the checkpoint must have its names and shapes
        """
        errors: list[str] = []
        for path in self._indexes():
            try:
                saved = self._read(path, first)
                self._memory.restore(saved.memory)
                return saved, errors
            except DpfedError as error:
                errors.append(str(error))
        return None, errors

    def _read(self, path: Path, first: State) -> LoadedCheckpoint:
        try:
            index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if index.pop("sha256") != index_hash(index) or index["format"] != FORMAT:
                raise ValueError
            blob = path.with_suffix(".safetensors").read_bytes()
            if hashlib.sha256(blob).hexdigest() != index["state"]:
                raise ValueError
            tensors = {name: value.clone() for name, value in load_tensors(blob).items()}
            rounds_taken = np.zeros(int(index["clients"]), dtype=np.int64)
            for client, count in index["taken"].items():
                rounds_taken[int(client)] = count
            # Keep only the file's name and drop any folders. A damaged index then cannot point to
            # files outside the checkpoint's folder.
            memory = {
                int(i): Entry(Path(file).name, str(sha))
                for i, (file, sha) in index["memory"].items()
            }
            job = index["job"]
            clip = float(index["clip"])
            t = int(index["round"])
            seconds = float(index["seconds"])
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
        return LoadedCheckpoint(Progress(t, state, seconds), rounds_taken, memory, backend)

    def _indexes(self) -> list[Path]:
        """Return the paths of the checkpoints' index files, newest round first."""
        rounds = {
            int(path.stem.removeprefix("round-")): path
            for path in self._folder.glob("round-*.json")
            if path.stem.removeprefix("round-").isdecimal()
        }
        return [rounds[t] for t in sorted(rounds, reverse=True)]

    def _remove_old(self) -> None:
        """Delete old checkpoints, and files of client memory that no remaining checkpoint uses."""
        indexes = self._indexes()
        # Ignore errors, because an old file that cannot be deleted does no harm.
        with suppress(OSError):
            for path in indexes[CHECKPOINTS_STORED:]:
                path.unlink(missing_ok=True)
                path.with_suffix(".safetensors").unlink(missing_ok=True)
        named: set[str] = set()
        for path in indexes[:CHECKPOINTS_STORED]:
            try:
                memory = json.loads(path.read_text(encoding="utf-8"))["memory"]
                named |= {str(file) for file, _ in memory.values()}
            except DAMAGE:
                # This index is unreadable, so it is unknown which memory files it needs. Delete
                # none of them.
                return
        with suppress(OSError):
            self._memory.prune(named)


def index_hash(index: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's index; the caller first removes the key "sha256"."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def job_hash(settings: dict[str, Any], theta: torch.Tensor) -> str:
    """Return the SHA-256 of a run's settings and initial parameters.

    They determine the results of the run.
    """
    text = json.dumps(settings, sort_keys=True).encode()
    return hashlib.sha256(text + theta.detach().cpu().numpy().tobytes()).hexdigest()

"""Store a client's files for each run: its last replies, and vectors for later rounds.

The client memory consists of the vectors that an algorithm keeps at the client between rounds.

    runs/<hash of the run's name>/reply-12-<hash of the request>    reply of round 12
    runs/<...>/score-12-<hash of the request>    reply of round 12 with noised counts of answers
    runs/<...>/memory-12.pending    memory after round 12, if the server may not have used its reply
    runs/<...>/memory-9.kept        memory after round 9, if the server has used its reply
    runs/<...>/cap                  largest number of this client's rounds in the run, if limited

Replies are stored before they are sent. Files are written atomically, and every operation may be
repeated after a crash.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpfed.algorithms.base import ClientState
from dpfed.errors import DpfedError
from dpfed.federation.policy import RefusedError
from dpfed.privacy.ledger.private_files import (
    fsync,
    make_private_folder,
    open_private,
    restrict_file,
    restrict_tree,
)
from dpfed.training.run_folder.atomic_file import write_file

LOG = logging.getLogger("dpfed")
Kind = Literal["reply", "score"]
FOLDERS = ("runs", "flower")
FILES = ("ledger.db*", "held-out.key*", ".held-out.key*")
# Number of stored replies. A server that resumes from a checkpoint may repeat its last two
# requests, but no older ones.
STORED_REPLIES = 2


@contextmanager
def claim(state: Path) -> Iterator[None]:
    """Reserve the state folder for this process; raise DpfedError if another client uses it."""
    # Use a lock of flock: the operating system releases it when the process ends or crashes.
    with open_private(own_folder(state) / "in-use.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DpfedError(
                f"{state} is in use by another `dpfed client`: "
                "each client needs a folder, a name and a key of its own"
            ) from None
        yield


def own_folder(state: Path) -> Path:
    """Create a client's state folder if missing, and return it.

    The files that dpfed writes in the folder become readable for their owner only. Other files,
    such as client.toml, keep their permissions.
    """
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(state)
        for folder in FOLDERS:
            restrict_tree(state / folder)
        for pattern in FILES:
            for path in state.glob(pattern):
                restrict_file(path)
    except OSError as error:
        reason = error.strerror or error
        raise DpfedError(
            f"client.state = {str(state)!r} cannot be restricted to its owner: {reason}"
        ) from None
    return state


class Store:
    """The stored files of one run: replies of one kind, and the client memory.

    The client memory consists of the vectors that an algorithm keeps at the client between rounds.

    kind  "reply" for replies to training requests, "score" for replies with counts of answers
    """

    def __init__(self, state: Path, run: str, kind: Kind = "reply") -> None:
        self.folder = state / "runs" / hashlib.sha256(run.encode()).hexdigest()[:32]
        self._kind = kind

    def reply(self, round: int, request: str) -> bytes | None:
        """Return the stored reply to the request whose hash is `request`; None if there is none."""
        try:
            return self._path(round, request).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DpfedError(
                f"the stored message of round {round} cannot be read: {error}"
            ) from None

    def keep_reply(self, round: int, request: str, data: bytes) -> None:
        """Write a reply to disk, and delete all but the newest `STORED_REPLIES` replies."""
        write_file(self._path(round, request), lambda file: file.write(data))
        for old in self._replies()[:-STORED_REPLIES]:
            old.unlink(missing_ok=True)

    def keep_cap(self, cap: int) -> None:
        """Store `cap`, the largest number of this client's rounds in the run.

        Do nothing if `cap` is 0 (no limit), or if a cap is stored already.
        """
        if cap and self.cap() is None:
            write_file(self._cap_path, lambda file: file.write(f"{cap}\n".encode()))

    def cap(self) -> int | None:
        """Return the stored limit on this client's rounds in the run; None if there is none."""
        try:
            return int(self._cap_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            LOG.error("%s is damaged", self._cap_path)
            raise RefusedError(
                "its cap on rounds of this run is damaged: this client cannot go on in this run"
            ) from None

    @property
    def _cap_path(self) -> Path:
        return self.folder / "cap"

    def last_reply(self) -> int:
        """Return the round of the newest stored reply; 0 if there is none."""
        return max(map(_round_of, self._replies()), default=0)

    def keep_memory(self, round: int, memory: ClientState) -> None:
        """Store the vectors that the client keeps after a round (client memory) in a pending file.

        A later request says if the server used the reply of this round. `settle` then keeps or
        deletes the file.
        """
        if not memory:
            return
        tensors = {name: x.detach().float().cpu().contiguous() for name, x in memory.items()}
        blob = save_tensors(tensors)
        write_file(self.folder / f"memory-{round}.pending", lambda file: file.write(blob))

    def settle(self, used: int) -> None:
        """Keep the stored vectors (client memory) of round `used`; delete those of other rounds.

        used  last round whose reply the server used; 0 if none
        """
        kept = self.folder / f"memory-{used}.kept"
        pending = self.folder / f"memory-{used}.pending"
        newer = [path for path in self.folder.glob("memory-*.kept") if _round_of(path) > used]
        if newer:
            raise RefusedError(
                f"the server says that round {used} was the last one used, "
                f"and it has said {_round_of(newer[0])} before"
            )
        if used and not kept.exists():
            if not pending.exists():
                raise RefusedError(
                    f"the memory of round {used} is gone: this client cannot go on in this run"
                )
            os.replace(pending, kept)
            fsync(self.folder)
        for other in self.folder.glob("memory-*"):
            if other != kept:
                other.unlink(missing_ok=True)

    def memory(
        self, used: int, names: Sequence[str], size: int, device: torch.device
    ) -> ClientState:
        """Return the client memory after round `used`: vectors `[1, P]` by name, and `seen`.

        `seen` is True if the server has used a reply of this client. Before that, `used` is 0 and
        the vectors are zero. The result is {} if `names` is empty: the algorithm has no memory.

        size  P, the number of trained numbers
        """
        if not names:
            return {}
        vectors: dict[str, Tensor] = {name: torch.zeros(1, size) for name in names}
        if used:
            path = self.folder / f"memory-{used}.kept"
            try:
                found = load_tensors(path.read_bytes())
                vectors = {name: found[name].clone().reshape(1, size) for name in names}
            except (OSError, KeyError, RuntimeError, ValueError, SafetensorError):
                LOG.error("%s is missing or damaged", path)
                raise RefusedError(
                    f"the memory of round {used} is missing or damaged: "
                    "this client cannot go on in this run"
                ) from None
        memory = {name: value.to(device) for name, value in vectors.items()}
        return memory | {"seen": torch.tensor([used > 0], device=device)}

    def _path(self, round: int, request: str) -> Path:
        return self.folder / f"{self._kind}-{round}-{request}"

    def _replies(self) -> list[Path]:
        """Return the paths of the stored replies, oldest round first."""
        return sorted(self.folder.glob(f"{self._kind}-*"), key=_round_of)


def _round_of(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])

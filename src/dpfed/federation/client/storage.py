"""What a client keeps on its disk for each run: the last messages it sent, and the algorithm's memory.

    runs/<hash of the run's name>/reply-12-<hash of the request>    stored before it is sent
    runs/<...>/score-12-<hash of the request>    the same for a noised count of right answers
    runs/<...>/memory-12.pending    made in round 12, and not known to have been used
    runs/<...>/memory-9.kept        the server said that the message of round 9 was used

Files appear whole or not at all, and every operation may be repeated after a crash.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
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
from dpfed.privacy.private_files import fsync, make_private_folder, restrict_file, restrict_tree
from dpfed.training.run_folder.atomic_file import write_file

LOG = logging.getLogger("dpfed")
Kind = Literal["reply", "score"]
FOLDERS = ("runs", "flower")
FILES = ("ledger.db*", "held-out.key*", ".held-out.key*")
KEPT = (
    2  # a server that goes on from its last checkpoint may ask again for the round before the last
)


def own_folder(state: Path) -> Path:
    """Return a client's state folder, restricted to its owner with all that this program keeps in it.

    Other files in it are left alone: the folder may be that of client.toml.
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
        why = error.strerror or error
        raise DpfedError(
            f"client.state = {str(state)!r} cannot be restricted to its owner: {why}"
        ) from None
    return state


class Store:
    """The folder of one run."""

    def __init__(self, state: Path, run: str) -> None:
        self.folder = state / "runs" / hashlib.sha256(run.encode()).hexdigest()[:32]

    def reply(self, round: int, request: str, kind: Kind = "reply") -> bytes | None:
        """The bytes that answered this very request, if they were stored."""
        try:
            return (self.folder / f"{kind}-{round}-{request}").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DpfedError(
                f"the stored message of round {round} cannot be read: {error}"
            ) from None

    def keep_reply(self, round: int, request: str, data: bytes, kind: Kind = "reply") -> None:
        """On the disk when it returns."""
        write_file(self.folder / f"{kind}-{round}-{request}", lambda file: file.write(data))
        for old in self._replies(kind)[:-KEPT]:
            old.unlink(missing_ok=True)

    def last_reply(self, kind: Kind = "reply") -> int:
        replies = self._replies(kind)
        return _round_of(replies[-1]) if replies else 0

    def keep_memory(self, round: int, memory: ClientState) -> None:
        """Pending: what it becomes is for the next request to say."""
        if not memory:
            return
        blob = save_tensors(
            {name: value.detach().float().cpu().contiguous() for name, value in memory.items()}
        )
        write_file(self.folder / f"memory-{round}.pending", lambda file: file.write(blob))

    def settle(self, used: int) -> None:
        """Commits the memory of the round whose message was used last, and drops what was made after it."""
        kept, pending = self.folder / f"memory-{used}.kept", self.folder / f"memory-{used}.pending"
        newer = [path for path in self.folder.glob("memory-*.kept") if _round_of(path) > used]
        if newer:
            raise RefusedError(
                f"the server says that round {used} was the last one used, and it has said {_round_of(newer[0])} before"
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
        """The committed vectors `[1, P]` with `seen`, zero where there are none yet; `{}` without names."""
        if not names:
            return {}
        held: dict[str, Tensor] = {name: torch.zeros(1, size) for name in names}
        if used:
            path = self.folder / f"memory-{used}.kept"
            try:
                found = load_tensors(path.read_bytes())
                held = {name: found[name].clone().reshape(1, size) for name in names}
            except (OSError, KeyError, RuntimeError, ValueError, SafetensorError):
                LOG.error("%s is missing or damaged", path)
                raise RefusedError(
                    f"the memory of round {used} is missing or damaged: this client cannot go on in this run"
                ) from None
        return {name: value.to(device) for name, value in held.items()} | {
            "seen": torch.tensor([used > 0], device=device)
        }

    def _replies(self, kind: Kind) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(f"{kind}-*"), key=_round_of)


def _round_of(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])

"""What the jobs of one process have in common, made once: records on the device, and a model with its frozen weights."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Thing = TypeVar("Thing")


class JobCache:
    """The newest of each kind of thing; another is made when it is asked for by another key.

    lock  held while a job is prepared: initial weights are drawn through torch's one global generator
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._purpose: Any = None

    def only_for(self, purpose: Any) -> None:
        """Lets go of what was made for another purpose: it would only take room."""
        with self.lock:
            if purpose != self._purpose:
                self._kept.clear()
                self._purpose = purpose

    def get(self, kind: str, key: Any, make: Callable[[], Thing]) -> Thing:
        with self.lock:
            if kind not in self._kept or self._kept[kind][0] != key:
                self._kept.pop(kind, None)  # first, so that two large ones are never held
                self._kept[kind] = (key, make())
            found: Thing = self._kept[kind][1]
            return found

    def clear(self) -> None:
        """For a run that shares nothing, and needs the room."""
        with self.lock:
            self._kept.clear()


def frozen_digest(model: nn.Module) -> str:
    """Of all that is not trained, on the CPU. A model whose frozen weights follow the run's seed is another model.

    peft keeps the head that its trained copy has replaced; nothing is computed with it.
    """
    digest = hashlib.blake2b(digest_size=16)
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    for name, tensor in [*frozen, *model.named_buffers()]:
        if ".original_module." in f".{name}":
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

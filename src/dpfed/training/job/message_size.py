"""What travels between the server and one client in a round, found by running the algorithm on tensors without values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm, Context, Message
from dpfed.model.parameter_vector import Space

META = torch.device("meta")


@dataclass(frozen=True)
class Traffic:
    """Numbers and bytes of one client in one round: its message up, the broadcast down.

    A handful of numbers (round, learning rate, clip norm, under quantile clipping its count) is not counted.
    """

    up_numbers: int
    up_bytes: int
    down_numbers: int
    down_bytes: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def traffic(algorithm: Algorithm, space: Space) -> Traffic:
    """Sizes of what `broadcast` names and of the message that `finish` makes."""
    up, down = meta_message(algorithm, space)
    return Traffic(*_size(list(up.values())), *_size(list(down.values())))


def meta_message(
    algorithm: Algorithm, space: Space, varying_phi: bool = False
) -> tuple[Message, Message]:
    """The message `[1, ...]` of one client and the fields of the broadcast, as tensors without values."""
    server, _, message = _played(algorithm, space, varying_phi)
    return message, {name: getattr(server, name) for name in algorithm.broadcast}


def local_bytes(algorithm: Algorithm, space: Space) -> int:
    """Bytes of one client's state within a round."""
    _, local, _ = _played(algorithm, space)
    return _size([x for x in vars(local).values() if isinstance(x, Tensor)])[1]


def _played(
    algorithm: Algorithm, space: Space, varying_phi: bool = False
) -> tuple[Any, Any, Message]:
    """Server, state of one client after a step, and its message, all without values."""
    ctx, ghost = _context(space, varying_phi), torch.empty(space.size, device=META)
    server = algorithm.init(ctx, ghost)
    memory = {name: torch.empty(1, space.size, device=META) for name in algorithm.remembers}
    if memory:
        memory["seen"] = torch.zeros(1, dtype=torch.bool, device=META)
    local = algorithm.start(ctx, server, memory)
    local = algorithm.step(ctx, local, _Ghost(), torch.ones((), dtype=torch.float64, device=META))
    message, _ = algorithm.finish(ctx, server, local)
    return server, local, message


def _context(space: Space, varying_phi: bool) -> Context:
    def scalar() -> Tensor:
        return torch.ones((), dtype=torch.float64, device=META)

    phi = torch.empty(1, 1, device=META)
    return Context(
        _GhostSpace(space), 1, 1, 1, 1, scalar(), scalar(), scalar(), phi, varying_phi=varying_phi
    )


class _GhostSpace:
    """The space's shapes without its block index, which would have to have values."""

    def __init__(self, space: Space) -> None:
        self.size, self.num_blocks, self._space = space.size, space.num_blocks, space

    def slices(self) -> list[slice]:
        return self._space.slices()

    def block_mean(self, vector: Tensor) -> Tensor:
        return vector.new_empty(*vector.shape[:-1], self.num_blocks)

    def expand(self, values: Tensor) -> Tensor:
        return values.new_empty(*values.shape[:-1], self.size)


class _Ghost:
    """An oracle that gives tensors of the right shape and nothing in them."""

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(theta), torch.empty(1, 1, device=META)

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self(theta)


def _size(tensors: list[Any]) -> tuple[int, int]:
    return sum(x.numel() for x in tensors), sum(x.numel() * x.element_size() for x in tensors)

"""Compute the sizes of messages between server and clients.

For this, one round of the algorithm runs on torch's meta tensors, which have shapes but no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm, Context, Message
from dpfed.config import FederationSection
from dpfed.model.parameter_vector import Space
from dpfed.training.messages.message_format import Layout, layout_of

META = torch.device("meta")


@dataclass(frozen=True)
class Traffic:
    """Sizes of one client's messages in one round: up to the server, and down from the server.

    Each size is a count of numbers and a count of bytes. The bytes depend on `federation.upload`
    and `federation.download`. The few public numbers of a round, such as learning rate and clip
    norm, are not counted.
    """

    up_numbers: int
    up_bytes: int
    down_numbers: int
    down_bytes: int


def traffic(
    algorithm: Algorithm, space: Space, section: FederationSection | None = None
) -> Traffic:
    """Return the size of a client's message to the server and of the server's broadcast.

    section  section [federation] of the configuration, which sets the formats of messages; None
             for float32
    """
    return Traffic(*(n for layout in layouts(algorithm, space, section) for n in _total(layout)))


def layouts(
    algorithm: Algorithm,
    space: Space,
    section: FederationSection | None = None,
    varying_phi: bool = False,
) -> tuple[Layout, Layout]:
    """Return the layouts of a client's message to the server and of the server's broadcast.

    A layout has the length and the format of each vector.

    section      section [federation] of the configuration, which sets the formats of messages;
                 None for float32
    varying_phi  True if the variance of the noise may differ between rounds (quantile clipping)
    """
    section = section or FederationSection()
    server, _, message = _meta_round(algorithm, space, varying_phi)
    up = {name: value.shape[1] for name, value in message.items()}
    if varying_phi:
        # With quantile clipping, a client also sends a number: the noised fraction of gradients
        # whose norm is at most the clip norm.
        up["below"] = 1
    down = {name: len(getattr(server, name)) for name in algorithm.broadcast}
    return (
        layout_of(up, algorithm, space.size, section.upload),
        layout_of(down, algorithm, space.size, section.download),
    )


def _total(layout: Layout) -> tuple[int, int]:
    fields = layout.values()
    return sum(field.size for field in fields), sum(field.bytes for field in fields)


def local_bytes(algorithm: Algorithm, space: Space) -> int:
    """Return the number of bytes of the state that an algorithm has for one client in a round."""
    _, local, _ = _meta_round(algorithm, space)
    tensors = [x for x in vars(local).values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def _meta_round(
    algorithm: Algorithm, space: Space, varying_phi: bool = False
) -> tuple[Any, Any, Message]:
    """Run one round of one client, with one local step, on meta tensors (shapes without values).

    Return (server's state, client's state after the step, client's message).
    """
    one = torch.ones((), dtype=torch.float64, device=META)
    phi = torch.empty(1, 1, device=META)
    ctx = Context(_MetaSpace(space), 1, 1, 1, 1, one, one, one, phi, varying_phi=varying_phi)
    server = algorithm.init(ctx, torch.empty(space.size, device=META))
    memory = {name: torch.empty(1, space.size, device=META) for name in algorithm.remembers}
    if memory:
        memory["seen"] = torch.zeros(1, dtype=torch.bool, device=META)
    local = algorithm.start(ctx, server, memory)
    local = algorithm.step(ctx, local, _MetaOracle(), one)
    message, _ = algorithm.finish(ctx, server, local)
    return server, local, message


class _MetaSpace:
    """Replacement for `Space` on meta tensors; its methods return tensors of the right shape.

    `Space` itself needs to know the block of each number. Such an index has values, and meta
    tensors have none.
    """

    def __init__(self, space: Space) -> None:
        self.size = space.size
        self.num_blocks = space.num_blocks
        self.slices = space.slices

    def block_mean(self, vector: Tensor) -> Tensor:
        return vector.new_empty(*vector.shape[:-1], self.num_blocks)

    def expand(self, values: Tensor) -> Tensor:
        return values.new_empty(*values.shape[:-1], self.size)


class _MetaOracle:
    """Replacement for the oracle on meta tensors; its gradients have a shape but no values."""

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(theta), torch.empty(1, 1, device=META)

    again = __call__

"""All trainable numbers of a model, in a fixed order, as one flat vector; and its partition into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

LONG = 2**15  # mean length of stretches from which on a sum for each is quicker than one pass over all


@dataclass(frozen=True)
class Space:
    """Named trainable tensors <-> one vector of length P (`size`), and the block index of each coordinate.

    A vector may carry leading axes: `[S, P]` is S clients side by side. Everything here is a view where it can be.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    block_names: tuple[str, ...]
    blocks: Tensor  # [P] int64: the block of each coordinate
    _counts: Tensor = field(init=False, repr=False, compare=False)
    _stretches: list[tuple[int, int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.blocks.shape != (self.size,):
            raise ValueError(f"the block index has shape {tuple(self.blocks.shape)}, the space has {self.size} numbers")
        counts = torch.bincount(self.blocks, minlength=len(self.block_names))
        if len(counts) != len(self.block_names) or bool((counts == 0).any()):
            raise ValueError("every block needs a name and at least one coordinate")
        object.__setattr__(self, "_counts", counts.to(torch.float32))
        object.__setattr__(self, "_stretches", stretches(self.blocks))

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)

    def slices(self) -> list[slice]:
        """The stretch of the vector that belongs to each tensor, in order."""
        out, start = [], 0
        for shape in self.shapes:
            out.append(slice(start, start + prod(shape)))
            start += prod(shape)
        return out

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of `[..., P]` as the named tensors `[..., *shape]`."""
        if vector.shape[-1] != self.size:
            raise ValueError(f"the vector has {vector.shape[-1]} numbers, the space has {self.size}")
        lead = vector.shape[:-1]
        return {
            name: vector[..., part].view((*lead, *shape))
            for name, shape, part in zip(self.names, self.shapes, self.slices(), strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector `[P]` of the named tensors, which must be exactly those of this space."""
        missing = set(self.names) ^ set(tensors)
        if missing:
            raise ValueError(f"these tensors do not match the space: {sorted(missing)[:3]}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the space has {tuple(shape)}")
        return torch.cat([tensors[name].detach().reshape(-1).float() for name in self.names])

    def block_mean(self, vector: Tensor) -> Tensor:
        """`[..., P]` -> `[..., blocks]`."""
        sums = vector.new_zeros(*vector.shape[:-1], self.num_blocks)
        if not self._stretches:
            return sums.index_add_(-1, self.blocks, vector) / self._counts
        for block, start, end in self._stretches:  # a GPU would let millions of additions to one number wait in line
            sums[..., block] += vector[..., start:end].sum(-1)
        return sums / self._counts

    def expand(self, values: Tensor) -> Tensor:
        """`[..., blocks]` -> `[..., P]`."""
        return values[..., self.blocks]

    def to(self, device: torch.device | str) -> Space:
        return Space(self.names, self.shapes, self.block_names, self.blocks.to(device))


def stretches(blocks: Tensor) -> list[tuple[int, int, int]]:
    """Where the coordinates of one block lie side by side: block, first coordinate, and the one after the last. None where
    such stretches are short."""
    which, lengths = torch.unique_consecutive(blocks.cpu(), return_counts=True)
    if len(blocks) < LONG * len(which):
        return []
    ends = lengths.cumsum(0)
    return list(zip(which.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True))


def space_of(
    tensors: Mapping[str, Tensor], block_names: Sequence[str] | None = None, blocks: Tensor | None = None
) -> Space:
    """The space of these tensors; without a block index each tensor is one block."""
    names = tuple(tensors)
    shapes = tuple(tensors[name].shape for name in names)
    if blocks is None:
        blocks = torch.repeat_interleave(torch.arange(len(names)), torch.tensor([prod(s) for s in shapes]))
        block_names = names
    return Space(names, shapes, tuple(block_names or ()), blocks)

"""All trainable numbers of a model, in a fixed order, as one flat vector; and its partition into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

CHUNK = 32  # numbers; heads are as wide, or a multiple


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
    _chunks: Tensor = field(
        init=False, repr=False, compare=False
    )  # which chunks lie within one block
    _chunk_blocks: Tensor = field(init=False, repr=False, compare=False)  # theirs
    _rest: Tensor = field(init=False, repr=False, compare=False)  # the coordinates of all others
    _rest_blocks: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.blocks.shape != (self.size,):
            raise ValueError(
                f"the block index has shape {tuple(self.blocks.shape)}, the space has {self.size} numbers"
            )
        counts = torch.bincount(self.blocks, minlength=len(self.block_names))
        if len(counts) != len(self.block_names) or bool((counts == 0).any()):
            raise ValueError("every block needs a name and at least one coordinate")
        whole = self.size // CHUNK * CHUNK
        chunks = self.blocks[:whole].view(-1, CHUNK)
        pure = (chunks == chunks[:, :1]).all(1)
        others = torch.ones_like(self.blocks, dtype=torch.bool)
        others[:whole] = ~pure.repeat_interleave(CHUNK)
        within, rest = pure.nonzero()[:, 0], others.nonzero()[:, 0]
        found = {
            "_chunks": within,
            "_chunk_blocks": chunks[within, 0],
            "_rest": rest,
            "_rest_blocks": self.blocks[rest],
        }
        for name, value in (found | {"_counts": counts.to(torch.float64)}).items():
            object.__setattr__(self, name, value)

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
            raise ValueError(
                f"the vector has {vector.shape[-1]} numbers, the space has {self.size}"
            )
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
                raise ValueError(
                    f"{name} has shape {tuple(tensors[name].shape)}, the space has {tuple(shape)}"
                )
        return torch.cat([tensors[name].detach().reshape(-1).float() for name in self.names])

    def block_mean(self, vector: Tensor) -> Tensor:
        """`[..., P]` -> `[..., blocks]`: sums over chunks that lie within one block, then over those in double precision. One number
        that takes up millions loses the small ones, and a GPU would let all additions to it wait in line."""
        if vector.shape[-1] != self.size:
            raise ValueError(
                f"the vector has {vector.shape[-1]} numbers, the space has {self.size}"
            )
        sums = vector.new_zeros(*vector.shape[:-1], self.num_blocks, dtype=torch.float64)
        count = self.size // CHUNK
        chunks = vector[..., : count * CHUNK].view(*vector.shape[:-1], count, CHUNK)
        chunks = chunks.sum(-1, dtype=torch.promote_types(vector.dtype, torch.float32))
        for values, which, blocks in (
            (chunks, self._chunks, self._chunk_blocks),
            (vector, self._rest, self._rest_blocks),
        ):
            sums = sums.index_add(-1, blocks, values.index_select(-1, which).to(torch.float64))
        return (sums / self._counts).to(vector.dtype)

    def expand(self, values: Tensor) -> Tensor:
        """`[..., blocks]` -> `[..., P]`."""
        return values[..., self.blocks]

    def to(self, device: torch.device | str) -> Space:
        return Space(self.names, self.shapes, self.block_names, self.blocks.to(device))


def space_of(
    tensors: Mapping[str, Tensor],
    block_names: Sequence[str] | None = None,
    blocks: Tensor | None = None,
) -> Space:
    """The space of these tensors; without a block index each tensor is one block."""
    names = tuple(tensors)
    shapes = tuple(tensors[name].shape for name in names)
    if blocks is None:
        blocks = torch.repeat_interleave(
            torch.arange(len(names)), torch.tensor([prod(s) for s in shapes])
        )
        block_names = names
    return Space(names, shapes, tuple(block_names or ()), blocks)

"""All trainable numbers of a model as one flat vector in a fixed order, divided into blocks.

A block is a group of numbers that share one second moment in Adam-like optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

# `block_mean` first sums chunks of this many adjacent numbers. The width of most attention heads is
# a multiple of it, so most chunks lie inside one block.
CHUNK = 32


@dataclass(frozen=True)
class Space:
    """The layout of all trainable tensors in one vector of length P (`size`), and its blocks.

    A block is a group of numbers that share one second moment in Adam-like optimizers.

    names, shapes  names and shapes of the tensors, in the order of the vector
    block_names    names of the blocks
    blocks         the index of each number's block, int64 `[P]`

    A vector may have leading axes: `[S, P]` holds one vector for each of S clients. The results of
    methods share memory with the arguments where possible.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    block_names: tuple[str, ...]
    blocks: Tensor
    _counts: Tensor = field(init=False, repr=False, compare=False)
    # `_chunks` has the indices and blocks of all chunks (CHUNK adjacent numbers) that lie inside
    # one block. `_rest` has those of all other numbers.
    _chunks: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)
    _rest: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.blocks.shape != (self.size,):
            raise ValueError(
                f"the block index has shape {tuple(self.blocks.shape)}, "
                f"the space has {self.size} numbers"
            )
        counts = torch.bincount(self.blocks, minlength=self.num_blocks)
        if len(counts) != self.num_blocks or bool((counts == 0).any()):
            raise ValueError("every block needs a name and at least one coordinate")
        whole = self.size // CHUNK * CHUNK
        chunks = self.blocks[:whole].view(-1, CHUNK)
        pure = (chunks == chunks[:, :1]).all(1)
        others = torch.ones_like(self.blocks, dtype=torch.bool)
        others[:whole] = ~pure.repeat_interleave(CHUNK)
        within = pure.nonzero()[:, 0]
        rest = others.nonzero()[:, 0]
        object.__setattr__(self, "_counts", counts.to(torch.float64))
        object.__setattr__(self, "_chunks", (within, chunks[within, 0]))
        object.__setattr__(self, "_rest", (rest, self.blocks[rest]))

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)

    def slices(self) -> list[slice]:
        """Return for each tensor the slice of the vector that holds it, in the order of `names`."""
        ends = list(accumulate(prod(shape) for shape in self.shapes))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a vector `[..., P]` holds, by name, without a copy.

        Each tensor has the leading axes of the vector before its own axes.
        """
        self._check_size(vector)
        lead = vector.shape[:-1]
        return {
            name: vector[..., part].view((*lead, *shape))
            for name, shape, part in zip(self.names, self.shapes, self.slices(), strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the named tensors as one float32 vector `[P]`.

        Raise ValueError if their names or shapes differ from those of this layout.
        """
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
        """Return the mean of the numbers in each block, `[..., P]` -> `[..., blocks]`.

        Numbers are first summed in chunks. The sums of the chunks are then added in double
        precision, because millions of additions to one float32 number would lose small numbers.
        Fewer additions are also faster on a GPU, where additions to the same number run one after
        another.
        """
        self._check_size(vector)
        sums = vector.new_zeros(*vector.shape[:-1], self.num_blocks, dtype=torch.float64)
        count = self.size // CHUNK
        chunks = vector[..., : count * CHUNK].view(*vector.shape[:-1], count, CHUNK)
        chunks = chunks.sum(-1, dtype=torch.promote_types(vector.dtype, torch.float32))
        for values, (which, blocks) in ((chunks, self._chunks), (vector, self._rest)):
            sums = sums.index_add(-1, blocks, values.index_select(-1, which).to(torch.float64))
        return (sums / self._counts).to(vector.dtype)

    def _check_size(self, vector: Tensor) -> None:
        if vector.shape[-1] != self.size:
            raise ValueError(
                f"the vector has {vector.shape[-1]} numbers, the space has {self.size}"
            )

    def expand(self, values: Tensor) -> Tensor:
        """Give each number the value of its block, `[..., blocks]` -> `[..., P]`."""
        return values[..., self.blocks]

    def to(self, device: torch.device | str) -> Space:
        return Space(self.names, self.shapes, self.block_names, self.blocks.to(device))


def space_of(tensors: Mapping[str, Tensor]) -> Space:
    """Return the layout of these tensors in one flat vector, in which each tensor is one block."""
    names = tuple(tensors)
    shapes = tuple(tensor.shape for tensor in tensors.values())
    sizes = torch.tensor([prod(shape) for shape in shapes])
    return Space(names, shapes, names, torch.repeat_interleave(torch.arange(len(names)), sizes))

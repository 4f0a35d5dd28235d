"""Convert the flat vector of trainable parameters to a second layout, called row, and back.

In a row, some tensors are transposed or followed by a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfed.model.parameter_vector import Space

# If the pieces have on average at least this many elements, copying piece by piece is faster than
# copying all elements by an index.
LARGE = 2**15


@dataclass
class Piece:
    """A range of elements that are adjacent in the flat vector and in its second layout, the row.

    vector  index of the first element in the vector
    row     index of the first element in the row
    size    number of elements
    sides   shape of the tensor in the vector if the row holds its transpose; otherwise None
    """

    vector: int
    row: int
    size: int
    sides: tuple[int, int] | None


class Layout:
    """The row, a second layout of the flat vector, and conversions in both directions.

    space       the layout of the flat vector
    transposed  for each tensor, True if the row holds its transpose
    step        each tensor starts at a multiple of this many numbers, so there may be gaps

    Numbers are copied in pieces, which are adjacent in both layouts. A few large pieces are copied
    one by one. Many small pieces are copied together, with one index per number.
    """

    def __init__(self, space: Space, transposed: Sequence[bool], step: int = 1) -> None:
        # The start of each tensor in the row. The last entry is the length of the row.
        self.starts = [0]
        self.pieces: list[Piece] = []
        self.size = 0
        for shape, is_transposed in zip(space.shapes, transposed, strict=True):
            sides = (shape[0], shape[1]) if is_transposed else None
            self._append(Piece(self.size, self.starts[-1], shape.numel(), sides))
            self.size += shape.numel()
            self.starts.append(self.starts[-1] + -(-shape.numel() // step) * step)
        self.is_vector = self.starts[-1] == self.size and all(p.sides is None for p in self.pieces)
        self.by_pieces = self.is_vector or self.size >= LARGE * len(self.pieces)
        self._index = None if self.by_pieces else self.index().to(space.blocks.device)

    def _append(self, piece: Piece) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last and last.sides is piece.sides is None and last.row + last.size == piece.row:
            # This piece continues the previous piece in the vector and in the row, so join the two:
            # one copy then moves both.
            last.size += piece.size
        else:
            self.pieces.append(piece)

    def index(self) -> Tensor:
        """Return for each number of the flat vector its position in the row, `[P]`.

        The row is the second layout of the P trainable numbers.
        """
        places = [torch.arange(0)]
        for piece in self.pieces:
            within = piece.row + torch.arange(piece.size)
            if piece.sides is not None:
                within = within.view(piece.sides[::-1]).t().reshape(-1)
            places.append(within)
        return torch.cat(places)

    def rows(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """Return S flat vectors `[S, P]` as rows `[S, length of a row]`, with zeros in the gaps.

        The row is the second layout of the P trainable numbers. `dtype` is the dtype of the rows.
        """
        rows = vectors.new_zeros(vectors.shape[0], self.starts[-1], dtype=dtype)
        if self._index is not None:
            return rows.index_copy_(1, self._index.to(vectors.device), vectors.to(dtype))
        for piece in self.pieces:
            _in_row(rows, piece).copy_(_in_vector(vectors, piece))
        return rows

    def vectors(self, rows: Tensor) -> Tensor:
        """Return S rows as flat vectors `[S, P]`.

        The row is the second layout of the P trainable numbers. If it equals the first layout,
        return `rows` itself.
        """
        if self.is_vector:
            return rows
        if self._index is not None:
            return rows.index_select(1, self._index.to(rows.device))
        vectors = rows.new_empty(rows.shape[0], self.size)
        for piece in self.pieces:
            _in_vector(vectors, piece).copy_(_in_row(rows, piece))
        return vectors


def _in_vector(vectors: Tensor, piece: Piece) -> Tensor:
    part = vectors[:, piece.vector : piece.vector + piece.size]
    return part if piece.sides is None else part.view(len(part), *piece.sides)


def _in_row(rows: Tensor, piece: Piece) -> Tensor:
    part = rows[:, piece.row : piece.row + piece.size]
    return part if piece.sides is None else part.view(len(part), *piece.sides[::-1]).transpose(1, 2)

"""How the trainable tensors lie in a row that is not the flat vector itself: some as their transposes, with room between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfed.model.parameter_vector import Space

LARGE = (
    2**15
)  # numbers that a copy of their own is worth; an index for each number costs more than it moves


@dataclass
class Piece:
    """A stretch of numbers: where it begins in the vector and in the row, and its two sides if the row has its transpose."""

    vector: int
    row: int
    size: int
    sides: tuple[int, int] | None


class Layout:
    """Rows in which each tensor begins at a multiple of `step`, and `turned` ones are held as their transposes.

    Few large pieces are copied one by one; many small ones go together, by one index for each number.
    """

    def __init__(self, space: Space, turned: Sequence[bool], step: int = 1) -> None:
        self.starts = [0]  # of each tensor in the row, and the row's end
        self.pieces: list[Piece] = []
        self.size = 0
        for shape, is_turned in zip(space.shapes, turned, strict=True):
            sides = (shape[0], shape[1]) if is_turned else None
            self._append(Piece(self.size, self.starts[-1], shape.numel(), sides))
            self.size += shape.numel()
            self.starts.append(self.starts[-1] + -(-shape.numel() // step) * step)
        self.is_vector = self.starts[-1] == self.size and all(p.sides is None for p in self.pieces)
        self.by_pieces = self.is_vector or self.size >= LARGE * len(self.pieces)
        self._index = None if self.by_pieces else self.index().to(space.blocks.device)

    def _append(self, piece: Piece) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last and last.sides is piece.sides is None and last.row + last.size == piece.row:
            last.size += piece.size  # side by side in both: one stretch
        else:
            self.pieces.append(piece)

    def index(self) -> Tensor:
        """`[P]`: the place of every coordinate of the vector in the row."""
        places = [torch.arange(0)]
        for piece in self.pieces:
            within = piece.row + torch.arange(piece.size)
            places.append(
                within if piece.sides is None else within.view(piece.sides[::-1]).t().reshape(-1)
            )
        return torch.cat(places)

    def rows(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """`[S, P]` -> rows of their own, with zeros in between."""
        rows = vectors.new_zeros(vectors.shape[0], self.starts[-1], dtype=dtype)
        if self._index is not None:
            return rows.index_copy_(1, self._index.to(vectors.device), vectors.to(dtype))
        for piece in self.pieces:
            _in_row(rows, piece).copy_(_in_vector(vectors, piece))
        return rows

    def vectors(self, rows: Tensor) -> Tensor:
        """Back again; the rows themselves where they are the vectors."""
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

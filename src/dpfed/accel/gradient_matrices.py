"""Join the per-record gradients of all tensors into few matrices, and compute with their rows.

A row is the gradient of one record. The functions compute squared norms and weighted sums of rows,
and set rows to zero. They use the kernels of `accel.rows` where these kernels are usable, and plain
PyTorch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfed.accel import kernels_for

ALIGNED = 64
# The gradient of a tensor with at least this many elements forms a matrix of its own. One more
# matrix costs some kernel launches, but less than a copy of a large gradient.
LARGE = 2**15
# Each row is divided into pieces of this many columns, and squared norms are first computed for
# each piece.
PIECE = 256


@dataclass(frozen=True)
class GradientMatrices:
    """The gradients of M records, as few matrices with one row per record.

    matrices  `[M, columns]` each; one matrix may hold the gradients of several tensors side by side
    groups    for each matrix, the indices of the tensors whose gradients it holds
    sizes     for each tensor, its number of columns
    """

    matrices: list[Tensor]
    groups: list[list[int]]
    sizes: list[int]

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> GradientMatrices:
        groups = grouped(grads)
        matrices = [matrix_of([grads[i] for i in group]) for group in groups]
        return cls(matrices, groups, [g.shape[1] for g in grads])

    def clear(self, keep: Tensor) -> None:
        """Replace NaN and infinity by zero in the rows where the mask `keep [M]` is False.

        M is the number of records. The matrices are changed in place. The rejected rows get weight
        0 in `weighted_sum`, but 0 times NaN is NaN. The rows of all other records must be finite;
        their values do not change.
        """
        for rows in self.matrices:
            kernels = kernels_for("rows", rows)
            if kernels is None:
                rows.nan_to_num_(0.0, 0.0, 0.0)
            else:
                kernels.zero_rows(rows, keep)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the matrix product `[S, P]` of `weights [S, M]` and all gradients `[M, P]`.

        S is the number of sums, M the number of records, and P the number of trainable numbers.
        """
        return self.in_order(weighted_sums(weights, self.matrices))

    def in_order(self, sums: Sequence[Tensor]) -> Tensor:
        """Join `sums`, one `[S, columns]` per matrix, to `[S, P]` in the tensors' original order.

        S is the number of sums, and P the number of trainable numbers.
        """
        if len(self.groups) == 1:
            return sums[0][:, : sum(self.sizes)]
        parts: dict[int, Tensor] = {}
        for summed, group in zip(sums, self.groups, strict=True):
            first = 0
            for i in group:
                parts[i] = summed[:, first : first + self.sizes[i]]
                first += self.sizes[i]
        return torch.cat([parts[i] for i in range(len(self.sizes))], dim=1)


def grouped(grads: Sequence[Tensor]) -> list[list[int]]:
    """Assign the tensors to matrices: a large tensor alone, all others together in the last matrix.

    Return one list of tensor indices per matrix.
    """
    alone = [[i] for i, g in enumerate(grads) if _is_matrix(g)]
    together = [i for i, g in enumerate(grads) if not _is_matrix(g)]
    return [*alone, together] if together else alone


def _is_matrix(grad: Tensor) -> bool:
    """Return True if the gradient of one tensor can be a gradient matrix by itself, without a copy.

    It must be large and contiguous, and its rows must have a multiple of 64 numbers.
    """
    return grad.shape[1] >= LARGE and grad.shape[1] % ALIGNED == 0 and grad.is_contiguous()


def matrix_of(grads: Sequence[Tensor]) -> Tensor:
    """Join the gradients of several tensors, each `[M, n]` with its own n, side by side.

    A single large gradient is returned without a copy. Otherwise columns of zeros at the end make
    the length of a row a multiple of 64. The zeros change no sum.
    """
    if len(grads) == 1 and _is_matrix(grads[0]):
        return grads[0]
    size = sum(g.shape[1] for g in grads)
    return torch.cat([*grads, grads[0].new_zeros(len(grads[0]), -size % ALIGNED)], dim=1)


def row_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each piece of each row, `[M, pieces]`, for M rows.

    A piece is a range of adjacent columns. The squared norm of a row is the sum over its pieces.
    """
    kernels = kernels_for("rows", rows)
    squares: Tensor = piece_squares(rows) if kernels is None else kernels.squares(rows)
    return squares


def piece_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each piece of 256 columns of each row, by plain PyTorch.

    The norm of a piece is computed in float64 for float64 rows, else in float32. The square of the
    norm is float64.
    """
    precision = torch.float64 if rows.dtype == torch.float64 else torch.float32
    whole = rows.shape[1] // PIECE * PIECE
    pieces = rows[:, :whole].view(len(rows), whole // PIECE, PIECE)
    norms = torch.linalg.vector_norm(pieces, dim=2, dtype=precision)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True, dtype=precision)
    return torch.cat([norms, rest], dim=1).double().square()


def weighted_sums(weights: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of `weights [S, M]` and each matrix `[M, n]`, in the dtype of `weights`.

    Each of the S rows of `weights` gives one weighted sum of the gradients of M records. bfloat16
    gradients on a GPU are not copied to float32, which would need more memory. Instead each float32
    weight is split into three bfloat16 numbers. Their products with the gradients are exact in
    float32, and the GPU's tensor cores add them in float32.
    """
    parts = None
    sums = []
    for rows in matrices:
        if rows.dtype == torch.bfloat16 and rows.is_cuda:
            parts = three_parts(weights) if parts is None else parts
            sums.append(sum_of_parts(torch.mm(parts, rows, out_dtype=torch.float32)))
        else:
            sums.append(weights @ rows.to(weights.dtype))
    return sums


def three_parts(weights: Tensor) -> Tensor:
    """Split float32 `weights [S, M]` into three bfloat16 matrices whose sum is `weights`.

    The product of two bfloat16 numbers is exact in float32, so each part can be multiplied by
    bfloat16 gradients. The three matrices are returned as one, stacked as `[3*S, M]`.
    """
    parts: list[Tensor] = []
    rest = weights
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def sum_of_parts(products: Tensor) -> Tensor:
    """Add the three products of `three_parts` with a matrix, stacked as `[3*S, n]`, to `[S, n]`."""
    return products.view(3, len(products) // 3, -1).sum(0)

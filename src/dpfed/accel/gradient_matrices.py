"""Join per-record gradients `[M, n]` into few matrices, and add, clear and weight their rows.

Rows are read by our kernels where these are usable, and by torch's own operations elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dpfed.accel import passes_check, usable

ALIGNED = 64
# Columns from which on copying a tensor beside others costs more than a few kernels of its own.
LARGE = 2**15
PIECE = 256


@dataclass(frozen=True)
class GradientMatrices:
    """Gradients of M records, joined: tensor i is a block of columns of the matrix of its group."""

    matrices: list[Tensor]
    groups: list[list[int]]
    sizes: list[int]

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> GradientMatrices:
        groups = grouped(grads)
        matrices = [matrix_of([grads[i] for i in group]) for group in groups]
        return cls(matrices, groups, [g.shape[1] for g in grads])

    def clear(self, keep: Tensor) -> None:
        """Write zeros over what is not finite in the rows where `keep [M]` is False, in place."""
        for rows in self.matrices:
            kernels = kernels_for(rows)
            if kernels is None:
                rows.nan_to_num_(0.0, 0.0, 0.0)
            else:
                kernels.zero_rows(rows, keep)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return `weights [S, M]` times all gradients, `[S, P]`."""
        return self.in_order(weighted_sums(weights, self.matrices))

    def in_order(self, sums: Sequence[Tensor]) -> Tensor:
        """Return sums of the matrices as one tensor `[S, P]` with the columns of `grads`."""
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
    """Return the tensors of each matrix: a large tensor alone, all others together."""
    alone = [i for i, g in enumerate(grads) if _is_matrix(g)]
    together = [i for i, g in enumerate(grads) if not _is_matrix(g)]
    return [*([i] for i in alone), *([together] if together else [])]


def _is_matrix(grad: Tensor) -> bool:
    """Return True if kernels are as fast on this tensor as on an aligned copy."""
    return grad.shape[1] >= LARGE and grad.shape[1] % ALIGNED == 0 and grad.is_contiguous()


def matrix_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the gradients side by side; columns of zeros align the rows and change no sum."""
    if len(grads) == 1 and _is_matrix(grads[0]):
        return grads[0]
    size = sum(g.shape[1] for g in grads)
    return torch.cat([*grads, grads[0].new_zeros(len(grads[0]), -size % ALIGNED)], dim=1)


def row_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each piece of each row, `[M, pieces]`."""
    kernels = kernels_for(rows)
    squares: Tensor = piece_squares(rows) if kernels is None else kernels.squares(rows)
    return squares


def piece_squares(rows: Tensor) -> Tensor:
    """Return sums of squares over pieces of 256 numbers; float64 for float64 rows, else float32."""
    precision = torch.float64 if rows.dtype == torch.float64 else torch.float32
    whole = rows.shape[1] // PIECE * PIECE
    pieces = rows[:, :whole].view(len(rows), whole // PIECE, PIECE)
    norms = torch.linalg.vector_norm(pieces, dim=2, dtype=precision)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True, dtype=precision)
    return torch.cat([norms, rest], dim=1).double().square()


def kernels_for(rows: Tensor) -> ModuleType | None:
    """Return the kernels over rows where they are usable and passed their check."""
    return _checked_kernels(rows.device, rows.dtype) if usable(rows) else None


@functools.cache
def _checked_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Check the kernels once for each device and dtype, before any capture."""
    from dpfed.accel import rows

    right = passes_check(
        "kernels over rows of gradients", device, lambda: rows.right(device, dtype)
    )
    return rows if right else None


def weighted_sums(weights: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return `weights [S, M]` times each matrix `[M, n]`, in the precision of the weights.

    Half-precision rows on a GPU are not widened. A float32 weight is the sum of three bfloat16
    numbers, products of bfloat16 numbers are exact in float32, and tensor cores add in float32.
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
    """Split `[S, M]` in float32 into bfloat16 numbers `[3*S, M]` that add up to it."""
    parts: list[Tensor] = []
    rest = weights
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def sum_of_parts(products: Tensor) -> Tensor:
    """Add up the products of the three parts of each weight: `[3*S, n]` -> `[S, n]`."""
    return products.view(3, len(products) // 3, -1).sum(0)

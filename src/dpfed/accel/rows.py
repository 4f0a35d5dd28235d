"""Triton kernels that compute squared norms of rows of a gradient matrix, or set rows to zero.

Each row of a matrix `[M, P]` is the gradient of one record. A wrong squared norm would break the
privacy guarantee, because the norm decides how much the record is clipped. Before the first use,
`right` therefore compares the kernels with known results. The plain PyTorch versions are in
`accel.gradient_matrices`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import on_device

TITLE = "kernels over rows of gradients"
# How many numbers of a row one program reads or writes at a time; a power of two.
PIECE = 4096
# How many programs together set one row to zero.
WRITERS = 8
WARPS = 8
# A test value of the function `right`. It is finite in bfloat16 and float32, but its square
# overflows float32, so the sum of squares must be infinite.
HUGE = 1e30


def squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each piece of 4096 numbers, float32 `[M, ⌈P/4096⌉]`.

    `rows` has the gradients of M records with P numbers each, `[M, P]`. The sum of a piece with NaN
    or infinity is not finite. Each square goes through about two dozen additions of positive
    numbers. The relative error of a sum is therefore below 24 · 2^-24.
    """
    count, size = rows.shape
    pieces = -(-size // PIECE)
    out = torch.empty(count, pieces, dtype=torch.float32, device=rows.device)
    _check(rows)
    if out.numel():
        with on_device(rows):
            _squares[(count * pieces,)](
                rows, out, size, rows.stride(0), pieces, PIECE=PIECE, num_warps=WARPS
            )
    return out


def zero_rows(rows: Tensor, keep: Tensor) -> None:
    """Set the rows where `keep [M]` is False to zero, in place; do not read or write other rows."""
    count, size = rows.shape
    _check(rows)
    if rows.numel():
        flags = keep.to(torch.int32)
        with on_device(rows):
            _zero_rows[(count * WRITERS,)](
                rows, flags, size, rows.stride(0), PIECE=PIECE, WRITERS=WRITERS, num_warps=WARPS
            )


def right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if both kernels are exact on rows that include NaN, infinity and huge numbers.

    The call waits until the device has finished.
    """
    size = 2 * PIECE + 64
    rows = torch.zeros(8, size, dtype=dtype, device=device)
    rows[0] = 0.5
    rows[1, -1] = 3.0
    for row, value in ((2, math.nan), (3, math.inf), (4, -math.inf), (5, HUGE)):
        rows[row] = 1.0
        rows[row, PIECE + row] = value
    rows[6, :: PIECE // 2] = -2.0
    # The expected sum of squares of each row; None for a sum that must be infinite or NaN.
    exact = [size / 4, 9.0, None, None, None, None, 20.0, 0.0]
    found = squares(rows).double().sum(1).tolist()
    good = True
    for got, wanted in zip(found, exact, strict=True):
        good &= not math.isfinite(got) if wanted is None else got == wanted
    keep = torch.tensor([wanted is not None for wanted in exact], device=device)
    cleared = torch.where(keep.unsqueeze(1), rows, 0.0)
    zero_rows(rows, keep)
    return good and bool(torch.equal(rows, cleared))


def _check(rows: Tensor) -> None:
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError("kernels over rows need rows whose numbers lie one after another")


# A matrix may have more than 2^31 numbers, so the kernels below use 64-bit integers as indices.


@triton.jit
def _squares(rows, out, size, stride, pieces, PIECE: tl.constexpr):
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    column = (program % pieces) * PIECE + tl.arange(0, PIECE)
    x = tl.load(rows + row * stride + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + program, tl.sum(x * x, axis=0))


@triton.jit
def _zero_rows(rows, keep, size, stride, PIECE: tl.constexpr, WRITERS: tl.constexpr):
    program = tl.program_id(0)
    row = (program // WRITERS).to(tl.int64)
    if tl.load(keep + row) == 0:
        zeros = tl.zeros([PIECE], dtype=tl.float32).to(rows.dtype.element_ty)
        for first in range((program % WRITERS) * PIECE, size, WRITERS * PIECE):
            column = first + tl.arange(0, PIECE)
            tl.store(rows + row * stride + column, zeros, mask=column < size)

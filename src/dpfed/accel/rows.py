"""Kernels over the rows of a matrix of gradients `[M, P]`: each reads or writes no more of it than it must.

An error here would be one of privacy, so what is computed is checked against plain numbers before the first use (`right`).
This module needs triton: it is imported where `kernels.usable` says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import on

PIECE = 4096  # numbers of a row that one program takes; a power of two
WRITERS = 8  # programs for each row that may have to be cleared
WARPS = 8
HUGE = 1e30  # a number in all types but float16, its square is none in float32


def squares(rows: Tensor) -> Tensor:
    """Sums of squares of the pieces of each row `[M, ⌈P/4096⌉]` in float32; not finite where a number of the piece is not.

    A thread adds sixteen squares one after another, the threads' sums are added as a tree: two dozen additions of positive
    numbers lie between a square and its sum, so its error is below 24 · 2^-24 of it.
    """
    count, size = rows.shape
    pieces = -(-size // PIECE)
    out = torch.empty(count, pieces, dtype=torch.float32, device=rows.device)
    _check(rows)
    if out.numel():
        with on(rows):
            _squares[(count * pieces,)](
                rows, out, size, rows.stride(0), pieces, PIECE=PIECE, num_warps=WARPS
            )
    return out


def zero_rows(rows: Tensor, keep: Tensor) -> None:
    """Writes zeros over the rows where `keep [M]` is False; the others are neither read nor written."""
    count, size = rows.shape
    _check(rows)
    if rows.numel():
        with on(rows):
            _zero_rows[(count * WRITERS,)](
                rows,
                keep.to(torch.int32),
                size,
                rows.stride(0),
                PIECE=PIECE,
                WRITERS=WRITERS,
                num_warps=WARPS,
            )


def right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether both kernels do what they say, on a few rows that hold everything that matters; waits for the device."""
    size = 2 * PIECE + 64
    rows = torch.zeros(8, size, dtype=dtype, device=device)
    rows[0] = 0.5
    rows[1, -1] = 3.0
    for row, value in ((2, float("nan")), (3, float("inf")), (4, -float("inf")), (5, HUGE)):
        rows[row] = 1.0
        rows[row, PIECE + row] = value
    rows[6, :: PIECE // 2] = -2.0
    found = squares(rows).double().sum(1).tolist()
    exact = [size / 4, 9.0, *[None] * 4, 20.0, 0.0]
    same = all(
        f == e if e is not None else not abs(f) < float("inf")
        for f, e in zip(found, exact, strict=True)
    )
    keep = torch.tensor([e is not None for e in exact], device=device)
    wanted = torch.where(keep.unsqueeze(1), rows, 0.0)
    zero_rows(rows, keep)
    return same and bool(torch.equal(rows, wanted))


def _check(rows: Tensor) -> None:
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError("kernels over rows need rows whose numbers lie one after another")


# Places of numbers are counted in 64 bits: a matrix may have more than 2^31 of them.


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

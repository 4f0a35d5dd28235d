"""Triton kernels for attention within small windows, and for reordering rows into Swin's windows.

A window is a group of positions that attend only to one another. In BERT it is a whole record. One
program holds the scores and probabilities of one window and head in one tile (a block of numbers in
registers). This is the idea of FlashAttention (Dao et al. 2022). Products are summed in float32.
float32 inputs are not rounded to TF32. The operators that call these kernels are in
`accel.operators.attention`. Importing this module needs triton: import it only where `accel.usable`
returns True.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _probabilities(
    q, k, bias, mask, scale,
    N: tl.constexpr, SIDE: tl.constexpr, BIASED: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Return the attention probabilities of one window and head in float32, `[SIDE, SIDE]`.

    The window has N <= SIDE positions; columns beyond the first N are zero. If the mask hides all
    positions from a query, the row of this query is zero too. MASK_ROWS is 0 without a mask, 1 if
    all queries share one row of the mask, else N.
    """
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    inside = (i < N) & (j < N)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if BIASED:
        score += tl.load(bias + i * N + j, mask=inside, other=0.0).to(tl.float32)
    if MASK_ROWS == 1:
        score += tl.load(mask + j, mask=j < N, other=0.0).to(tl.float32)
    elif MASK_ROWS > 1:
        score += tl.load(mask + i * N + j, mask=inside, other=0.0).to(tl.float32)
    score = tl.where(j < N, score, float("-inf"))
    row_max = tl.max(score, 1)
    weights = tl.exp(score - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
    total = tl.sum(weights, 1)
    return weights / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["heads", "masks"])
def attend(
    q, k, v, bias, mask, out, scale, heads, masks,
    N: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the attention output of one window and head.

    q, k, v and out are `[windows, N, heads * D]`: N positions per window, and D numbers per head.
    """
    program = tl.program_id(0)
    window = program // heads
    head = program % heads
    rows = tl.arange(0, SIDE)[:, None]
    columns = tl.arange(0, DEPTH)[None, :]
    start = window.to(tl.int64) * (N * D * heads) + head * D
    at = start + rows * (heads * D) + columns
    inside = (rows < N) & (columns < D)
    queries = tl.load(q + at, mask=inside, other=0.0)
    keys = tl.load(k + at, mask=inside, other=0.0)
    values = tl.load(v + at, mask=inside, other=0.0)
    bias += head * (N * N)
    mask += (window % masks).to(tl.int64) * (MASK_ROWS * N)
    p = _probabilities(queries, keys, bias, mask, scale, N, SIDE, BIASED, MASK_ROWS)
    y = tl.dot(p.to(values.dtype), values, input_precision="ieee")
    tl.store(out + at, y.to(values.dtype), mask=inside)


@triton.jit(do_not_specialize=["heads", "masks"])
def attend_backward(
    grad, q, k, v, bias, mask, grad_q, grad_k, grad_v, scale, heads, masks,
    N: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and v for one window and head.

    The forward pass does not store the attention probabilities, so they are computed again here.
    """
    program = tl.program_id(0)
    window = program // heads
    head = program % heads
    rows = tl.arange(0, SIDE)[:, None]
    columns = tl.arange(0, DEPTH)[None, :]
    start = window.to(tl.int64) * (N * D * heads) + head * D
    at = start + rows * (heads * D) + columns
    inside = (rows < N) & (columns < D)
    queries = tl.load(q + at, mask=inside, other=0.0)
    keys = tl.load(k + at, mask=inside, other=0.0)
    values = tl.load(v + at, mask=inside, other=0.0)
    grad_out = tl.load(grad + at, mask=inside, other=0.0)
    bias += head * (N * N)
    mask += (window % masks).to(tl.int64) * (MASK_ROWS * N)
    p = _probabilities(queries, keys, bias, mask, scale, N, SIDE, BIASED, MASK_ROWS)
    grad_values = tl.dot(tl.trans(p.to(grad_out.dtype)), grad_out, input_precision="ieee")
    tl.store(grad_v + at, grad_values.to(values.dtype), mask=inside)
    grad_p = tl.dot(grad_out, tl.trans(values), input_precision="ieee")
    score = (p * (grad_p - tl.sum(p * grad_p, 1)[:, None])).to(grad_out.dtype)
    grad_queries = tl.dot(score, keys, input_precision="ieee") * scale
    tl.store(grad_q + at, grad_queries.to(queries.dtype), mask=inside)
    grad_keys = tl.dot(tl.trans(score), queries, input_precision="ieee") * scale
    tl.store(grad_k + at, grad_keys.to(keys.dtype), mask=inside)


@triton.jit(do_not_specialize=["count"])
def reorder(
    x, index, out, count,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows within each block `[N, WIDTH]`: row i of a block of `out` is row `index[i]` of `x`.

    `index[i]` counts rows from the start of the block. `count` is the number of rows of all blocks.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = row < count
    source = row - row % N + tl.load(index + row % N, mask=known, other=0)
    inside = known[:, None] & (column[None, :] < WIDTH)
    piece = tl.load(x + source[:, None] * WIDTH + column[None, :], mask=inside)
    tl.store(out + row[:, None] * WIDTH + column[None, :], piece, mask=inside)

"""Triton kernels for the matrix products of LoRA, where each sample has its own A and B.

two_products   L = s1 X W1, then Y += s2 L W2; an adapter's forward pass or the gradient of X
outer          s Xᵀ L; the gradient of A or of B

A and B are LoRA's two matrices, and s, s1 and s2 are scalar factors. For M samples with n positions
each, X is `[M, n, D]` and L is `[M, n, r]` with rank r. W1 and W2 are A and B, or B and A; they may
have any strides. All sums are in float32. `accel.operators.lora` has these products in plain
PyTorch. Importing this module needs triton: import it only where `accel.usable` returns True.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import nearly_equal, on_device

# If a kernel starts fewer programs than this, a large GPU is partly idle. Several programs then
# divide the second product of `two_products` among them.
BUSY = 264
# Largest LoRA rank per dtype. Larger ranks need more shared memory than some supported GPUs have.
MAX_RANK = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}


@triton.jit
def _two_products(
    x, w1, w2, y, low, n, d1, d2, r, s1, s2, x_m, w1_m, w1_d, w1_r, w2_m, w2_r, w2_d, y_m, low_m,
    N: tl.constexpr, R: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * N + tl.arange(0, N)
    part, parts = tl.program_id(2), tl.num_programs(2)
    ranks = tl.arange(0, R)
    has_row, has_rank = rows[:, None] < n, ranks[None, :] < r
    x += sample * x_m + rows[:, None] * d1
    w1 += sample * w1_m + ranks[None, :] * w1_r
    total = tl.zeros((N, R), dtype=tl.float32)
    for start in range(0, d1, D1):
        cols = start + tl.arange(0, D1)
        a = tl.load(x + cols[None, :], mask=has_row & (cols[None, :] < d1), other=0.0)
        b = tl.load(w1 + cols[:, None] * w1_d, mask=(cols[:, None] < d1) & has_rank, other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    kept = (total * s1).to(low.dtype.element_ty)
    if part == 0:
        tl.store(
            low + sample * low_m + rows[:, None] * r + ranks[None, :], kept, mask=has_row & has_rank
        )
    y += sample * y_m + rows[:, None] * d2
    w2 += sample * w2_m + ranks[:, None] * w2_r
    for start in range(part * D2, d2, parts * D2):
        cols = start + tl.arange(0, D2)
        inside = has_row & (cols[None, :] < d2)
        b = tl.load(
            w2 + cols[None, :] * w2_d, mask=(ranks[:, None] < r) & (cols[None, :] < d2), other=0.0
        )
        product = tl.dot(kept, b, input_precision="ieee")
        old = tl.load(y + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(y + cols[None, :], (old + s2 * product).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _outer(
    x, low, out, n, d, r, s, x_m, low_m, out_m,
    N: tl.constexpr, R: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute `s xᵀ low` of one sample, for D of the d columns of `x`, with the LoRA scale s.

    `x` is `[n, d]` and `low` is `[n, r]`, for the n positions of the sample and LoRA rank r. The
    result is `[D, r]`. If WIDE, its transpose `[r, D]` is stored instead.
    """
    sample = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * D + tl.arange(0, D)
    ranks = tl.arange(0, R)
    x += sample * x_m + cols[None, :]
    low += sample * low_m + ranks[None, :]
    if WIDE:
        total = tl.zeros((R, D), dtype=tl.float32)
    else:
        total = tl.zeros((D, R), dtype=tl.float32)
    for start in range(0, n, N):
        rows = start + tl.arange(0, N)
        a = tl.load(
            x + rows[:, None] * d, mask=(rows[:, None] < n) & (cols[None, :] < d), other=0.0
        )
        b = tl.load(
            low + rows[:, None] * r, mask=(rows[:, None] < n) & (ranks[None, :] < r), other=0.0
        )
        if WIDE:
            total += tl.dot(tl.trans(b), a, input_precision="ieee")
        else:
            total += tl.dot(tl.trans(a), b, input_precision="ieee")
    total = (total * s).to(out.dtype.element_ty)
    out += sample * out_m
    if WIDE:
        inside = (ranks[:, None] < r) & (cols[None, :] < d)
        tl.store(out + ranks[:, None] * d + cols[None, :], total, mask=inside)
    else:
        inside = (cols[:, None] < d) & (ranks[None, :] < r)
        tl.store(out + cols[:, None] * r + ranks[None, :], total, mask=inside)


def two_products(x: Tensor, w1: Tensor, w2: Tensor, y: Tensor, s1: float, s2: float) -> Tensor:
    """Compute `low = s1 x w1`, add `s2 low w2` to `y` in place, and return `low`.

    The shapes are x `[M, n, d1]`, w1 `[M, d1, r]`, w2 `[M, r, d2]` and y `[M, n, d2]`: M samples
    with n positions each, and LoRA rank r.
    """
    samples, n, d1 = x.shape
    r, d2 = w2.shape[1:]
    low = x.new_empty(samples, n, r)
    rows = block(n, 64)
    tiles = samples * triton.cdiv(n, rows)
    width = 64 if rows >= 64 else 128
    parts = 1
    if tiles < BUSY:
        parts = min(4, max(1, BUSY // tiles), triton.cdiv(d2, width))
    with on_device(x):
        _two_products[(samples, triton.cdiv(n, rows), parts)](
            x, w1, w2, y, low, n, d1, d2, r, s1, s2,
            x.stride(0), w1.stride(0), w1.stride(1), w1.stride(2),
            w2.stride(0), w2.stride(1), w2.stride(2), y.stride(0), low.stride(0),
            N=rows, R=block(r, 128), D1=piece(d1), D2=width, num_warps=4 if rows >= 64 else 2,
        )  # fmt: skip
    return low


def outer(x: Tensor, low: Tensor, s: float, wide: bool) -> Tensor:
    """Return the product `s xᵀ low` as `[M, d, r]`, or its transpose `[M, r, d]` if `wide`.

    The shapes are x `[M, n, d]` and low `[M, n, r]`: M samples with n positions each, and LoRA rank
    r.
    """
    samples, n, d = x.shape
    r = low.shape[2]
    out = x.new_empty(samples, r, d) if wide else x.new_empty(samples, d, r)
    width = piece(d)
    with on_device(x):
        _outer[(samples, triton.cdiv(d, width))](
            x, low, out, n, d, r, s, x.stride(0), low.stride(0), out.stride(0),
            N=block(n, 64), R=block(r, 128), D=width, WIDE=wide, num_warps=4,
        )  # fmt: skip
    return out


def block(size: int, most: int) -> int:
    """Return the side of a tile, the block of numbers that one GPU program computes.

    It is `size`, rounded up to a power of two and then limited to the range from 16 to `most`. A
    GPU's tensor cores need a side of at least 16.
    """
    return int(min(most, max(16, triton.next_power_of_2(size))))


def piece(width: int) -> int:
    """Return how many columns of a matrix one loop step reads: 32 or 64.

    It is 32 if `width` is a multiple of 32 but not of 64.
    """
    return 32 if width % 64 and width % 32 == 0 else 64


def fits(x: Tensor, r: int) -> bool:
    """Return True if the kernels accept the dtype and layout of `x` and the LoRA rank `r`."""
    return r <= MAX_RANK.get(x.dtype, 0) and x.is_contiguous()


def right(device: torch.device) -> bool:
    """Return True if the kernels agree with products that PyTorch computes in float64.

    The call waits until the device has finished.
    """
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 20, 40), (2, 20, 70), (2, 40, 3), (2, 3, 70))
    numbers = [torch.randn(shape, generator=g) for shape in shapes]
    good = True
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        x, y, a, b = (t.to(device, dtype) for t in numbers)
        exact_x, exact_y, exact_a, exact_b = (t.double() for t in (x, y, a, b))
        low = two_products(x, a, b, y, 0.5, 2.0)
        product = exact_x @ exact_a
        wanted = 2 * exact_x.mT @ low.double()
        good &= nearly_equal(low, 0.5 * product)
        good &= nearly_equal(y, exact_y + product @ exact_b)
        good &= nearly_equal(outer(x, low, 2.0, False), wanted)
        good &= nearly_equal(outer(x, low, 2.0, True), wanted.mT)
    return good

"""Triton kernels that copy the patches of images which a convolution reads, and that add them back.

    columns  images `[M, c, H, W]` -> patches `[M, c*h*w, places]`
    images   the adjoint: each pixel is the sum of its copies, added in float32 and rounded once

`places` is the number of positions at which the convolution puts its kernel of h x w pixels. A
plane is one channel of one image. Each program writes BLOCK adjacent numbers of the result. These
numbers may belong to several planes, so that a program also has enough work with small images.
`accel.operators.patches` has these operations in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import on_device
from dpfed.accel.operators.patches import Pair, patch_counts

TITLE = "kernels for convolutions"
# Number of elements of the result that one program of the kernel writes.
BLOCK = 1024
# A padded plane (one channel of one image) and its patches must have fewer numbers than this,
# because the kernels index them with 32-bit integers.
MAX_PLANE = 2**31 - BLOCK


@triton.jit
def _columns(
    x, y, total,
    H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * B
    size = KH * KW * DOWN * ACROSS
    plane = first // size
    at = (first - plane * size).to(tl.int32) + tl.arange(0, B)
    inside = first + tl.arange(0, B) < total
    plane_offset = at // size
    within = at % size
    offset = within // (DOWN * ACROSS)
    place = within % (DOWN * ACROSS)
    row = place // ACROSS * SH + offset // KW - PH
    column = place % ACROSS * SW + offset % KW - PW
    valid = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(
        x + plane * (H * W) + plane_offset.to(tl.int64) * (H * W) + (row * W + column),
        mask=valid,
        other=0.0,
    )
    tl.store(y + first + tl.arange(0, B), value, mask=inside)


@triton.jit
def _images(
    x, y, total,
    H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Add the patches `x` up into the images `y`: a pixel is the sum of its copies in all patches.

    A patch has KH rows of pixels. A pixel lies in row i of the patch that starts i rows above it.
    Patches start at multiples of the stride SH, so only every SH-th i is possible. Columns of
    pixels follow the same rule.
    """
    first = tl.program_id(0).to(tl.int64) * B
    plane = first // (H * W)
    at = (first - plane * (H * W)).to(tl.int32) + tl.arange(0, B)
    inside = first + tl.arange(0, B) < total
    plane_offset = at // (H * W)
    row = at % (H * W) // W + PH
    column = at % W + PW
    x += plane * (KH * KW * DOWN * ACROSS) + plane_offset.to(tl.int64) * (KH * KW * DOWN * ACROSS)
    value = tl.zeros([B], dtype=tl.float32)
    for a in range((KH + SH - 1) // SH):
        i = row % SH + a * SH
        down = row // SH - a
        has_row = inside & (i < KH) & (down >= 0) & (down < DOWN)
        for b in range((KW + SW - 1) // SW):
            j = column % SW + b * SW
            across = column // SW - b
            valid = has_row & (j < KW) & (across >= 0) & (across < ACROSS)
            entry = ((i * KW + j) * DOWN + down) * ACROSS + across
            value += tl.load(x + entry, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + first + tl.arange(0, B), value.to(y.dtype.element_ty), mask=inside)


def columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the patches of images `[M, c, H, W]`, like `torch.nn.functional.unfold`."""
    counts = patch_counts(x.shape, kernel, stride, padding)
    y = x.new_empty(x.shape[0], x.shape[1] * kernel[0] * kernel[1], counts[0] * counts[1])
    _run(_columns, x.contiguous(), y, x.shape[2:], counts, kernel, stride, padding)
    return y


def images(x: Tensor, shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return images of this shape, in which each pixel is the sum of its copies in the patches `x`.

    `x` is `[M, c*h*w, places]` as for `torch.nn.functional.fold`: the pixels of each h x w patch
    form a column.
    """
    y = x.new_empty(shape)
    counts = patch_counts(shape, kernel, stride, padding)
    _run(_images, x.contiguous(), y, shape[2:], counts, kernel, stride, padding)
    return y


def _run(kernel, x: Tensor, y: Tensor, *sizes: Sequence[int]) -> None:
    names = ("H", "W", "DOWN", "ACROSS", "KH", "KW", "SH", "SW", "PH", "PW")
    constants = dict(zip(names, (number for pair in sizes for number in pair), strict=True))
    if y.numel():
        grid = (triton.cdiv(y.numel(), BLOCK),)
        with on_device(x):
            kernel[grid](x, y, y.numel(), **constants, B=BLOCK, num_warps=4)


def fits(shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> bool:
    """Return True if images of this shape are small enough for the kernels.

    The kernels index one channel of an image, and the patches of this channel, with 32-bit
    integers.
    """
    padded = (shape[2] + 2 * padding[0]) * (shape[3] + 2 * padding[1])
    patches = prod(patch_counts(shape, kernel, stride, padding)) * kernel[0] * kernel[1]
    return max(padded, patches) < MAX_PLANE


def right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if both kernels give the results of `unfold` and `fold` for small integers.

    Small integers and their sums are exact in every dtype. The call waits until the device has
    finished.
    """
    g = torch.Generator().manual_seed(3)
    cases: tuple[tuple[tuple[int, ...], ...], ...] = (
        ((3, 5, 8, 8), (3, 3), (1, 1), (1, 1)),
        ((2, 3, 9, 6), (3, 2), (2, 1), (0, 1)),
        ((2, 4, 5, 11), (1, 4), (3, 2), (1, 2)),
    )
    good = True
    for shape, kernel, stride, padding in cases:
        x = torch.randint(-8, 9, shape, generator=g).float()
        wanted = F.unfold(x, kernel, 1, padding, stride)
        found = columns(x.to(device, dtype), kernel, stride, padding)
        grad = torch.randint(-8, 9, wanted.shape, generator=g).float()
        wanted_back = F.fold(grad, shape[2:], kernel, 1, padding, stride)
        back = images(grad.to(device, dtype), shape, kernel, stride, padding)
        good &= torch.equal(found.float().cpu(), wanted)
        good &= torch.equal(back.float().cpu(), wanted_back)
    return good

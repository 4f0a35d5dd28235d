"""The patches of images that a convolution sees, and the way back, in Triton: numbers next to one another are written together.

    columns  images `[M, c, H, W]` -> patches `[M, c*h*w, places]`
    images   the adjoint: each pixel is the sum of all entries that it was copied to, in float32, rounded once

A plane is one channel of one image. Programs take stretches of what is written, whatever planes they belong to, so that small
images fill them too. This module needs triton: it is imported where `kernels.usable` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import on, places

BLOCK = 1024  # numbers that one program writes
WARPS = 4
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST = (
    2**31 - BLOCK
)  # numbers of one plane, or of its patches; across planes they are counted in 64 bits
Pair = Sequence[int]  # down, across


@triton.jit
def _columns(
    x, y, total, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * B
    size = KH * KW * DOWN * ACROSS
    plane = first // size
    at = (first - plane * size).to(tl.int32) + tl.arange(0, B)
    inside = first + tl.arange(0, B) < total
    further = at // size
    within = at % size
    offset = within // (DOWN * ACROSS)
    place = within % (DOWN * ACROSS)
    row = place // ACROSS * SH + offset // KW - PH
    column = place % ACROSS * SW + offset % KW - PW
    known = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(
        x + plane * (H * W) + further.to(tl.int64) * (H * W) + (row * W + column),
        mask=known,
        other=0.0,
    )
    tl.store(y + first + tl.arange(0, B), value, mask=inside)


@triton.jit
def _images(
    x, y, total, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """x are columns here, y images. A pixel is row i of the patch that begins i rows above it: of all i only those count
    whose distance to the first is a multiple of the stride."""
    first = tl.program_id(0).to(tl.int64) * B
    plane = first // (H * W)
    at = (first - plane * (H * W)).to(tl.int32) + tl.arange(0, B)
    inside = first + tl.arange(0, B) < total
    further = at // (H * W)
    row = at % (H * W) // W + PH
    column = at % W + PW
    x += plane * (KH * KW * DOWN * ACROSS) + further.to(tl.int64) * (KH * KW * DOWN * ACROSS)
    value = tl.zeros([B], dtype=tl.float32)
    for a in range((KH + SH - 1) // SH):
        i = row % SH + a * SH
        down = row // SH - a
        has_row = inside & (i < KH) & (down >= 0) & (down < DOWN)
        for b in range((KW + SW - 1) // SW):
            j = column % SW + b * SW
            across = column // SW - b
            known = has_row & (j < KW) & (across >= 0) & (across < ACROSS)
            entry = ((i * KW + j) * DOWN + down) * ACROSS + across
            value += tl.load(x + entry, mask=known, other=0.0).to(tl.float32)
    tl.store(y + first + tl.arange(0, B), value.to(y.dtype.element_ty), mask=inside)


def columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The patches of images `[M, c, H, W]` as `[M, c*h*w, places]`, in the order of `torch.nn.functional.unfold`."""
    size = places(x.shape, kernel, stride, padding)
    y = x.new_empty(x.shape[0], x.shape[1] * kernel[0] * kernel[1], size[0] * size[1])
    _run(_columns, x.contiguous(), y, x.shape[2:], size, kernel, stride, padding)
    return y


def images(x: Tensor, shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The adjoint of `columns` for images of this shape, as `torch.nn.functional.fold`."""
    y = x.new_empty(shape)
    _run(
        _images,
        x.contiguous(),
        y,
        shape[2:],
        places(shape, kernel, stride, padding),
        kernel,
        stride,
        padding,
    )
    return y


def _run(kernel, x: Tensor, y: Tensor, *sizes: Sequence[int]) -> None:
    names = ("H", "W", "DOWN", "ACROSS", "KH", "KW", "SH", "SW", "PH", "PW")
    constants = dict(zip(names, (number for pair in sizes for number in pair), strict=True))
    if y.numel():
        with on(x):
            kernel[(triton.cdiv(y.numel(), BLOCK),)](
                x, y, y.numel(), **constants, B=BLOCK, num_warps=WARPS
            )


def fits(shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> bool:
    """Whether places within one plane of such images, and within its patches, can be counted in 32 bits."""
    padded = (shape[2] + 2 * padding[0]) * (shape[3] + 2 * padding[1])
    return (
        padded < MOST
        and prod(places(shape, kernel, stride, padding)) * kernel[0] * kernel[1] < MOST
    )


def right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether both kernels do what they say, by whole numbers that are exact in every type; waits for the device."""
    g = torch.Generator().manual_seed(3)
    cases: tuple[tuple[tuple[int, ...], ...], ...] = (
        ((3, 5, 8, 8), (3, 3), (1, 1), (1, 1)),
        ((2, 3, 9, 6), (3, 2), (2, 1), (0, 1)),
        ((2, 4, 5, 11), (1, 4), (3, 2), (1, 2)),
    )
    good = True
    for shape, *asked in cases:
        x = torch.randint(-8, 9, shape, generator=g).float()
        wanted = F.unfold(x, asked[0], 1, asked[2], asked[1])
        found = columns(x.to(device, dtype), *asked)
        grad = torch.randint(-8, 9, wanted.shape, generator=g).float()
        back = F.fold(grad, shape[2:], asked[0], 1, asked[2], asked[1])
        good &= torch.equal(found.float().cpu(), wanted)
        good &= torch.equal(images(grad.to(device, dtype), shape, *asked).float().cpu(), back)
    return good

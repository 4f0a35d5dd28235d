"""The patches of images that a convolution sees, as operators with backward passes: one kernel each way where there are any.

torch has them as `unfold` and `fold`, which on a GPU go through the images one by one. As operators of `torch` these work in
eager mode, in a CUDA graph and in compiled programs, and are differentiable as often as one likes: each is the other's adjoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.accel import places, seen_right, usable

Pair = Sequence[int]  # down, across


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """What a kernel sees of images `[M, c, H, W]`, as columns `[M, c*h*w, places]`."""
    if (*kernel, *stride, *padding) == (1, 1, 1, 1, 0, 0):
        return x.flatten(2)
    columns: Tensor = torch.ops.dpfed.patches(x, kernel, stride, padding)
    return columns


def _columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    kernels = kernels_for(x)
    if kernels is not None and kernels.fits(x.shape, kernel, stride, padding):
        return kernels.columns(x, kernel, stride, padding)  # type: ignore[no-any-return]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = padded.unfold(2, kernel[0], stride[0]).unfold(
        3, kernel[1], stride[1]
    )  # [M, c, down, across, h, w]
    seen = seen.permute(0, 1, 4, 5, 2, 3)
    return seen.reshape(
        len(x), seen.shape[1] * kernel[0] * kernel[1], seen.shape[4] * seen.shape[5]
    )


def _images(
    columns: Tensor, shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair
) -> Tensor:
    """The adjoint: the sum of all entries that a pixel was copied to."""
    kernels = kernels_for(columns)
    if kernels is not None and kernels.fits(shape, kernel, stride, padding):
        return kernels.images(columns, tuple(shape), kernel, stride, padding)  # type: ignore[no-any-return]
    down, across = places(shape, kernel, stride, padding)
    height, width = shape[2:]
    parts = columns.reshape(*shape[:2], kernel[0], kernel[1], down, across)
    x = columns.new_zeros(*shape[:2], height + 2 * padding[0], width + 2 * padding[1])
    for i in range(kernel[0]):
        rows = slice(i, i + (down - 1) * stride[0] + 1, stride[0])
        for j in range(kernel[1]):
            x[:, :, rows, slice(j, j + (across - 1) * stride[1] + 1, stride[1])] += parts[
                :, :, i, j
            ]
    return x[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width].contiguous()


def kernels_for(x: Tensor) -> ModuleType | None:
    """The kernels, where they can be used and were seen to be right."""
    if not usable(x):
        return None
    if (x.device, x.dtype) not in _ASKED and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # nothing can be tried now
    found = _checked_kernels(x.device, x.dtype)
    _ASKED.add(
        (x.device, x.dtype)
    )  # only now: another thread may be capturing while they are tried
    return found


_ASKED: set[tuple[torch.device, torch.dtype]] = set()


@functools.cache
def _checked_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Once for each device and type."""
    from dpfed.accel import patches as kernels

    if dtype not in kernels.TYPES:
        return None
    return (
        kernels
        if seen_right("kernels for convolutions", device, lambda: kernels.right(device, dtype))
        else None
    )


def _define() -> None:
    sizes = "int[] kernel, int[] stride, int[] padding"
    there = torch.library.custom_op(
        "dpfed::patches", _columns, mutates_args=(), schema=f"(Tensor x, {sizes}) -> Tensor"
    )
    back = torch.library.custom_op(
        "dpfed::patches_back",
        _images,
        mutates_args=(),
        schema=f"(Tensor columns, int[] shape, {sizes}) -> Tensor",
    )
    there.register_fake(_like_columns)
    back.register_fake(lambda columns, shape, *_: columns.new_empty(shape))
    there.register_autograd(_gradient, setup_context=_keep)
    back.register_autograd(_gradient_back, setup_context=_keep_back)


def _like_columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    down, across = places(x.shape, kernel, stride, padding)
    return x.new_empty(x.shape[0], x.shape[1] * kernel[0] * kernel[1], down * across)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.asked = inputs
    ctx.shape = x.shape


def _gradient(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.dpfed.patches_back(grad, ctx.shape, *ctx.asked), None, None, None


def _keep_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.asked = inputs[2:]


def _gradient_back(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.dpfed.patches(grad, *ctx.asked), None, None, None, None


_define()

"""Operators that copy the patches of images which a convolution reads, and that add them back.

On a GPU, PyTorch's `unfold` and `fold` process the images one by one, which is slow. The operators
here work in eager mode, in CUDA graphs and in compiled programs. Each of the two operators computes
the gradient of the other, so gradients of any order exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.accel import kernels_for

# Two numbers: one for the vertical and one for the horizontal direction.
Pair = Sequence[int]


def patch_counts(
    shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair
) -> tuple[int, int]:
    """Return the numbers of patches, down and across, that a convolution reads from an image.

    shape  shape of the image, `[..., H, W]`
    """
    down = (shape[-2] + 2 * padding[0] - kernel[0]) // stride[0] + 1
    across = (shape[-1] + 2 * padding[1] - kernel[1]) // stride[1] + 1
    if min(down, across) < 1:
        raise ValueError(
            f"a kernel of {kernel[0]} x {kernel[1]} does not fit images of "
            f"{shape[-2]} x {shape[-1]}"
        )
    return down, across


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the patches of images `[M, c, H, W]` as columns `[M, c*h*w, places]`.

    A patch is the part of an image under the convolution's kernel of h x w pixels. `places` is the
    number of positions of this kernel.
    """
    if (*kernel, *stride, *padding) == (1, 1, 1, 1, 0, 0):
        return x.flatten(2)
    columns: Tensor = torch.ops.dpfed.patches(x, kernel, stride, padding)
    return columns


def _columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the patches of images as columns; a Triton kernel copies them where possible."""
    kernels = kernels_for("patches", x)
    if kernels is not None and kernels.fits(x.shape, kernel, stride, padding):
        return kernels.columns(x, kernel, stride, padding)  # type: ignore[no-any-return]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = padded.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    seen = seen.permute(0, 1, 4, 5, 2, 3)  # [M, c, h, w, down, across]
    return seen.reshape(
        len(x), seen.shape[1] * kernel[0] * kernel[1], seen.shape[4] * seen.shape[5]
    )


def _images(
    columns: Tensor, shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair
) -> Tensor:
    """Return images in which each pixel is the sum of its copies in the patches `columns`.

    This is the adjoint of `_columns`: from the gradient of its result it computes the gradient of
    the images.
    """
    kernels = kernels_for("patches", columns)
    if kernels is not None and kernels.fits(shape, kernel, stride, padding):
        return kernels.images(columns, tuple(shape), kernel, stride, padding)  # type: ignore[no-any-return]
    down, across = patch_counts(shape, kernel, stride, padding)
    height, width = shape[2:]
    parts = columns.reshape(*shape[:2], kernel[0], kernel[1], down, across)
    x = columns.new_zeros(*shape[:2], height + 2 * padding[0], width + 2 * padding[1])
    for i in range(kernel[0]):
        rows = slice(i, i + (down - 1) * stride[0] + 1, stride[0])
        for j in range(kernel[1]):
            places = slice(j, j + (across - 1) * stride[1] + 1, stride[1])
            x[:, :, rows, places] += parts[:, :, i, j]
    return x[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width].contiguous()


def _define() -> None:
    sizes = "int[] kernel, int[] stride, int[] padding"
    forward = torch.library.custom_op(
        "dpfed::patches", _columns, mutates_args=(), schema=f"(Tensor x, {sizes}) -> Tensor"
    )
    back = torch.library.custom_op(
        "dpfed::patches_back",
        _images,
        mutates_args=(),
        schema=f"(Tensor columns, int[] shape, {sizes}) -> Tensor",
    )
    forward.register_fake(_empty_columns)
    back.register_fake(lambda columns, shape, *_: columns.new_empty(shape))
    forward.register_autograd(_gradient, setup_context=_save)
    back.register_autograd(_gradient_back, setup_context=_save_back)


def _empty_columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    down, across = patch_counts(x.shape, kernel, stride, padding)
    return x.new_empty(x.shape[0], x.shape[1] * kernel[0] * kernel[1], down * across)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.sizes = inputs
    ctx.shape = x.shape


def _gradient(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.dpfed.patches_back(grad, ctx.shape, *ctx.sizes), None, None, None


def _save_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes = inputs[2:]


def _gradient_back(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.dpfed.patches(grad, *ctx.sizes), None, None, None, None


_define()

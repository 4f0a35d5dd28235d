"""Triton kernels for layer normalisation with frozen weights.

One program normalises several rows. PyTorch uses a whole block of threads for each row, which is
slower if rows are short. The operator that calls these kernels is in `accel.operators.norm`.
Importing this module needs triton: import it only where `accel.usable` returns True.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import FLOATS, nearly_equal, on_device

# The largest number of columns that the kernels accept.
MAX_WIDTH = 4096
# Number of elements that one program of the kernel holds in registers.
PROGRAM_SIZE = 4096


@triton.jit
def _forward(x, weight, bias, y, mean, rstd, rows, width, eps, R: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, C)
    has = (row[:, None] < rows) & (col[None, :] < width)
    at = row[:, None] * width + col[None, :]
    value = tl.load(x + at, mask=has, other=0.0).to(tl.float32)
    row_mean = tl.sum(value, axis=1) / width
    centered = tl.where(has, value - row_mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / width + eps)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    b = tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)
    out = centered * scale[:, None] * w[None, :] + b[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=has)
    tl.store(mean + row, row_mean, mask=row < rows)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def _backward(grad, x, weight, mean, rstd, out, rows, width, R: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, C)
    has = (row[:, None] < rows) & (col[None, :] < width)
    at = row[:, None] * width + col[None, :]
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)
    row_mean = tl.load(mean + row, mask=row < rows, other=0.0)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=has, other=0.0).to(tl.float32) * w[None, :]
    value = tl.load(x + at, mask=has, other=0.0).to(tl.float32)
    standard = tl.where(has, (value - row_mean[:, None]) * scale[:, None], 0.0)
    projection = tl.sum(g * standard, axis=1) / width
    shift = tl.sum(g, axis=1) / width
    found = (g - standard * projection[:, None] - shift[:, None]) * scale[:, None]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=has)


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """Return the sizes of `x` and of the tile, the block of numbers that one program computes.

    The four integers are the number of rows of `x`, the width of a row, and the numbers of rows and
    columns of a tile. A tile has as many columns as the width, rounded up to a power of two.
    """
    width = x.shape[-1]
    columns = int(triton.next_power_of_2(width))
    return x.numel() // width, width, max(1, PROGRAM_SIZE // columns), columns


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised `x`, and each row's mean and reciprocal standard deviation."""
    rows, width, together, columns = _shape(x)
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    with on_device(x):
        _forward[(triton.cdiv(rows, together),)](
            x, weight, bias, y, mean, rstd, rows, width, eps, R=together, C=columns, num_warps=4
        )
    return y, mean, rstd


def backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of `x`, given `grad`, the gradient of the normalised `x`.

    `mean` and `rstd` are each row's mean and reciprocal standard deviation, from `forward`.
    """
    rows, width, together, columns = _shape(x)
    out = torch.empty_like(x)
    with on_device(x):
        _backward[(triton.cdiv(rows, together),)](
            grad, x, weight, mean, rstd, out, rows, width, R=together, C=columns, num_warps=4
        )
    return out


def fits(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return True if the kernels accept the dtypes, shapes and layouts of these tensors."""
    same_type = x.dtype == weight.dtype == bias.dtype
    same_width = weight.shape == bias.shape == x.shape[-1:]
    contiguous = x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()
    sized = 0 < x.shape[-1] <= MAX_WIDTH and x.numel() > 0
    return x.dtype in FLOATS and same_type and same_width and contiguous and sized


def right(device: torch.device) -> bool:
    """Return True if the kernels agree with PyTorch's `layer_norm` in float64.

    The call waits until the device has finished.
    """
    g = torch.Generator().manual_seed(1)
    numbers = [3 + torch.randn(50, 96, generator=g) for _ in range(2)]
    numbers += [torch.randn(96, generator=g) for _ in range(2)]
    good = True
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        x, grad, weight, bias = (t.to(device, dtype) for t in numbers)
        y, mean, rstd = forward(x, weight, bias, 1e-5)
        grad_x = backward(grad, x, weight, mean, rstd).cpu()
        x, grad, weight, bias = (t.cpu().double() for t in (x, grad, weight, bias))
        # Compute these gradients on the CPU. The caller may be PyTorch's thread for GPU gradients,
        # so gradients on the GPU would be a deadlock.
        with torch.enable_grad():
            wanted = F.layer_norm(x.requires_grad_(), (96,), weight, bias, 1e-5)
            (back,) = torch.autograd.grad(wanted, x, grad)
        good &= nearly_equal(y.cpu(), wanted.detach()) and nearly_equal(grad_x, back)
    return good

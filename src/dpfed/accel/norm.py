"""Layer normalisation with frozen weights in Triton: several narrow rows at once, where torch spends a block of threads on each.

This module needs triton: it is imported where `kernels.usable` says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import alike, on

MOST = 4096  # numbers of a row
TOGETHER = 4096  # numbers that one program holds


@triton.jit
def _forward(x, weight, bias, y, mean, rstd, rows, width, eps, R: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, C)
    has = (row[:, None] < rows) & (col[None, :] < width)
    at = row[:, None] * width + col[None, :]
    value = tl.load(x + at, mask=has, other=0.0).to(tl.float32)
    middle = tl.sum(value, axis=1) / width
    apart = tl.where(has, value - middle[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, axis=1) / width + eps)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    b = tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)
    out = apart * scale[:, None] * w[None, :] + b[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=has)
    tl.store(mean + row, middle, mask=row < rows)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def _backward(grad, x, weight, mean, rstd, out, rows, width, R: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, C)
    has = (row[:, None] < rows) & (col[None, :] < width)
    at = row[:, None] * width + col[None, :]
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)
    middle = tl.load(mean + row, mask=row < rows, other=0.0)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=has, other=0.0).to(tl.float32) * w[None, :]
    value = tl.load(x + at, mask=has, other=0.0).to(tl.float32)
    standard = tl.where(has, (value - middle[:, None]) * scale[:, None], 0.0)
    along = tl.sum(g * standard, axis=1) / width
    shift = tl.sum(g, axis=1) / width
    found = (g - standard * along[:, None] - shift[:, None]) * scale[:, None]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=has)


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    width = x.shape[-1]
    columns = int(triton.next_power_of_2(width))
    return x.numel() // width, width, max(1, TOGETHER // columns), columns


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows, and each row's mean and reciprocal standard deviation."""
    rows, width, together, columns = _shape(x)
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    with on(x):
        _forward[(triton.cdiv(rows, together),)](
            x, weight, bias, y, mean, rstd, rows, width, eps, R=together, C=columns, num_warps=4
        )
    return y, mean, rstd


def backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """With respect to x."""
    rows, width, together, columns = _shape(x)
    out = torch.empty_like(x)
    with on(x):
        _backward[(triton.cdiv(rows, together),)](
            grad, x, weight, mean, rstd, out, rows, width, R=together, C=columns, num_warps=4
        )
    return out


def fits(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernels take it: rows one after another, of the width that the layer has."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    same = x.dtype == weight.dtype == bias.dtype and weight.shape == bias.shape == x.shape[-1:]
    packed = x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()
    return x.dtype in known and same and packed and 0 < x.shape[-1] <= MOST and x.numel() > 0


def right(device: torch.device) -> bool:
    """Whether the kernels do what they say on this device; waits for it."""
    g = torch.Generator().manual_seed(1)
    numbers = [3 + torch.randn(50, 96, generator=g) for _ in range(2)] + [
        torch.randn(96, generator=g) for _ in range(2)
    ]
    good = True
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        x, grad, weight, bias = (t.to(device, dtype) for t in numbers)
        y, mean, rstd = forward(x, weight, bias, 1e-5)
        found = y.cpu(), backward(grad, x, weight, mean, rstd).cpu()
        x, grad, weight, bias = (t.cpu().double() for t in (x, grad, weight, bias))
        # On the CPU: a GPU's gradients have a thread of torch's own, which may be the one that waits for this answer.
        with torch.enable_grad():
            wanted = torch.nn.functional.layer_norm(x.requires_grad_(), (96,), weight, bias, 1e-5)
            (back,) = torch.autograd.grad(wanted, x, grad)
        good &= alike(found[0], wanted.detach()) and alike(found[1], back)
    return good

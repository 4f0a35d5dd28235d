"""Dropout whose mask is a hash of the record's key, the layer and the position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfed.accel import kernels_for

_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(x: Tensor) -> Tensor:
    """Return the hash of each int64 number: SplitMix64's finaliser (Steele, Lea, Flood 2014).

    The masks make the shifts logical.
    """
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def keep_mask(key: Tensor, rule: Tensor, width: int) -> Tensor:
    """Return booleans `[M, width]` for keys `[M]`, True with probability 1 - drop.

    rule `[2]`: the start of the layer's stream, and how many of 2^24 draws it drops.
    """
    start, dropped = rule
    stream = mix(key + start).unsqueeze(1)
    # Not a product of positions: compilers fold that into huge constants.
    bits = mix(stream ^ torch.arange(width, device=key.device))
    kept: Tensor = ((bits >> 40) & 0xFFFFFF) >= dropped
    return kept


def drop(x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
    """Return `x` with numbers dropped by their records' keys and the others scaled up."""
    kernels = None if torch.compiler.is_compiling() else kernels_for("dropout", x)
    if kernels is not None and kernels.fits(x, key, rule):
        y: Tensor = DropoutFunction.apply(x, key, rule)  # type: ignore[no-untyped-call]
        return y
    return x * _scaled_mask(x, key, rule, x.numel() // len(key)).view(x.shape)


def drop_records(x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
    """Return `x` with whole records dropped by their keys and the others scaled up."""
    mask = _scaled_mask(x, key, rule, 1).repeat_interleave(x.shape[0] // len(key), 0)
    return x * mask.view(-1, *([1] * (x.dim() - 1)))


def _scaled_mask(x: Tensor, key: Tensor, rule: Tensor, width: int) -> Tensor:
    scale = 1 / (1 - rule[1].float() * 2.0**-24)
    # Not a product: if all are dropped the scale is infinite, and 0 times it is not a number.
    return torch.where(keep_mask(key, rule, width), scale, 0.0).to(x.dtype)


class DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
        from dpfed.accel import dropout

        ctx.save_for_backward(key, rule)
        return dropout.drop(x, key, rule)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x = DropoutFunction.apply(grad.contiguous(), *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return grad_x, None, None

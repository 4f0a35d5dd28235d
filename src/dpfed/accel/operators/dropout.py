"""Keyed dropout: the mask is a hash of the record's key, the layer and the position.

Each record has a random key, so its mask does not depend on the other records of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfed.accel import kernels_for

_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(x: Tensor) -> Tensor:
    """Return the hash of each int64 number by SplitMix64's finaliser (Steele, Lea, Flood 2014).

    The hash needs unsigned shifts. A right shift of int64 fills the left side with copies of the
    sign bit, and `&` sets these copies to zero.
    """
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def keep_mask(key: Tensor, rule: Tensor, width: int) -> Tensor:
    """Return the mask `[M, width]` of M records with keys `[M]`: True where a number is kept.

    rule  `[2]`: start of the layer's random stream, and how many of 2^24 draws are dropped
    """
    start, dropped = rule
    stream = mix(key + start).unsqueeze(1)
    # Do not multiply the positions by a constant: a compiler would compute the products in advance
    # and store them as huge constants.
    bits = mix(stream ^ torch.arange(width, device=key.device))
    kept: Tensor = ((bits >> 40) & 0xFFFFFF) >= dropped
    return kept


def drop(x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
    """Return `x` with dropout of single numbers; kept numbers are divided by 1 - dropout rate.

    x     activations; the leading axis has k rows for each of the M records, in order of records
    key   the records' keys `[M]`
    rule  the layer's random stream and dropout rate, as in `keep_mask`
    """
    kernels = None if torch.compiler.is_compiling() else kernels_for("dropout", x)
    if kernels is not None and kernels.fits(x, key, rule):
        y: Tensor = DropoutFunction.apply(x, key, rule)  # type: ignore[no-untyped-call]
        return y
    return x * _scaled_mask(x, key, rule, x.numel() // len(key)).view(x.shape)


def drop_records(x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
    """Return `x` with whole records set to zero; kept records are divided by 1 - dropout rate.

    The arguments have the same meaning as those of `drop`.
    """
    mask = _scaled_mask(x, key, rule, 1).repeat_interleave(x.shape[0] // len(key), 0)
    return x * mask.view(-1, *([1] * (x.dim() - 1)))


def _scaled_mask(x: Tensor, key: Tensor, rule: Tensor, width: int) -> Tensor:
    scale = 1 / (1 - rule[1].float() * 2.0**-24)
    # Use `where` instead of a product of mask and scale. If the dropout rate is 1, the scale is
    # infinite, and 0 times infinity is NaN.
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

"""Dropout by a record's key (model/keyed.py) in Triton: the hash of each position stays on the chip, where torch's own operations
make a dozen passes over 64-bit numbers. The gradient goes through the same mask, made again.

This module needs triton: it is imported where `kernels.usable` says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import on

BLOCK = 1024
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, as `keyed.mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["width"])
def _drop(x, key, rule, y, width, B: tl.constexpr):
    record = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < width
    dropped = tl.load(rule + 1)
    bits = _mix(_mix(tl.load(key + record) + tl.load(rule)) ^ at)
    scale = tl.div_rn(1.0, 1.0 - dropped.to(tl.float32) * 5.9604644775390625e-08)  # 2^-24
    scale = scale.to(y.dtype.element_ty).to(tl.float32)
    mask = tl.where(((bits >> 40) & 0xFFFFFF) >= dropped, scale, 0.0)
    value = tl.load(x + record * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + record * width + at, (value * mask).to(y.dtype.element_ty), mask=inside)


def drop(x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
    """x, whose leading axis is a multiple of the records, times the mask of `keyed.keep_mask` over what it keeps on average."""
    y = torch.empty_like(x)
    width = x.numel() // len(key)
    with on(x):
        _drop[(triton.cdiv(width, BLOCK), len(key))](x, key, rule, y, width, B=BLOCK, num_warps=4)
    return y


def fits(x: Tensor, key: Tensor, rule: Tensor) -> bool:
    """Records one after another, all on one device; as many as a grid takes along its second axis."""
    same = x.device == key.device == rule.device and key.dtype == rule.dtype == torch.int64
    laid = (
        x.is_contiguous()
        and key.is_contiguous()
        and rule.is_contiguous()
        and key.dim() == 1
        and rule.shape == (2,)
    )
    return x.dtype in TYPES and same and laid and x.numel() > 0 and len(key) < 65536


def right(device: torch.device) -> bool:
    """Whether the kernel does what it says on this device, by whole numbers of Python; waits for it."""
    keys, start, dropped, width = (
        (12345, -(2**61) - 7, 2**62),
        2**62 + 11,
        2**22,
        1500,
    )  # one sum is beyond 2^63
    given = torch.linspace(1, 2, len(keys) * width).view(len(keys), width)
    kept = torch.tensor(
        [[(_hash(_hash(key + start) ^ i) >> 40) >= dropped for i in range(width)] for key in keys]
    )
    mask = kept.float() / (1 - torch.tensor(dropped).float() * 2.0**-24)
    key, rule = torch.tensor(keys, device=device), torch.tensor([start, dropped], device=device)
    types = (
        TYPES if device.type == "cuda" else (torch.float32, torch.float16)
    )  # triton's interpreter cuts bf16 off
    return all(
        torch.equal(drop(given.to(device, t), key, rule).cpu(), given.to(t) * mask.to(t))
        for t in types
    )


def _hash(x: int) -> int:
    whole = 2**64 - 1
    x &= whole
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & whole
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & whole
    return x ^ (x >> 31)

"""Triton kernel for keyed dropout, which reads and writes each number once.

Keyed dropout draws its mask from a random key of each record. A record's mask therefore does not
depend on the other records of the batch. The mask is a hash of the key and the position. It is
never stored: the backward pass computes it again. `accel.operators.dropout` has this function in
plain PyTorch. Importing this module needs triton: import it only where `accel.usable` returns True.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.accel import FLOATS, on_device

BLOCK = 1024


@triton.jit
def _mix(x):
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
    """Return `x` with dropout: dropped elements are 0, the others are divided by 1 - dropout rate.

    x     activations; the leading axis has k rows for each of the M records, in order of records
    key   the records' keys, int64 `[M]`
    rule  int64 `[2]`: start of the layer's random stream, and how many of 2^24 draws are dropped
    """
    y = torch.empty_like(x)
    width = x.numel() // len(key)
    with on_device(x):
        _drop[(triton.cdiv(width, BLOCK), len(key))](x, key, rule, y, width, B=BLOCK, num_warps=4)
    return y


def fits(x: Tensor, key: Tensor, rule: Tensor) -> bool:
    """Return True if the kernel accepts the devices, dtypes and shapes of these tensors."""
    same_device = x.device == key.device == rule.device
    contiguous = x.is_contiguous() and key.is_contiguous() and rule.is_contiguous()
    integers = key.dtype == rule.dtype == torch.int64
    # The second axis of a CUDA grid has at most 65535 programs.
    shaped = key.dim() == 1 and rule.shape == (2,) and x.numel() > 0 and len(key) < 65536
    return x.dtype in FLOATS and same_device and contiguous and integers and shaped


def right(device: torch.device) -> bool:
    """Return True if the kernel gives the same result as a computation with Python's integers.

    The call waits until the device has finished.
    """
    # The last key plus `start` exceeds 2^63, so this test also covers integer overflow.
    keys = (12345, -(2**61) - 7, 2**62)
    start = 2**62 + 11
    dropped = 2**22
    width = 1500
    x = torch.linspace(1, 2, len(keys) * width).view(len(keys), width)
    kept = torch.tensor(
        [[(_hash(_hash(key + start) ^ i) >> 40) >= dropped for i in range(width)] for key in keys]
    )
    mask = kept.float() / (1 - torch.tensor(dropped).float() * 2.0**-24)
    key = torch.tensor(keys, device=device)
    rule = torch.tensor([start, dropped], device=device)
    # Test bfloat16 only on a GPU: Triton's interpreter truncates to bfloat16 instead of rounding.
    types = FLOATS if device.type == "cuda" else (torch.float32, torch.float16)
    return all(
        torch.equal(drop(x.to(device, t), key, rule).cpu(), x.to(t) * mask.to(t)) for t in types
    )


def _hash(x: int) -> int:
    ones = 2**64 - 1
    x &= ones
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ones
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ones
    return x ^ (x >> 31)

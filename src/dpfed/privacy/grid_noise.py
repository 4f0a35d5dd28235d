"""Sums on a grid, against what the last bits of floating-point numbers give away (Mironov 2012).

    h = a power of two, at most 2^-k σC
    n = Σ round(ḡ_j / h) + round(σ (C + h √P / 2) z / h),  z ~ N(0, I) in double precision;  released: n h

Every unit's clipped gradient is rounded *before* summing, so the sum is a whole number of steps and so is the noise: what is
released has no residue that could differ between neighbours. (Rounding the noise alone would leave the sum's.) Rounding
moves a coordinate by h/2 at most, so one unit moves the sum by at most C + h √P / 2. The noise is made for that
sensitivity: the multiplier that is charged stays what it was, and the noise grows by less than LOSS.

What it does not cover: z is a rounded Gaussian of 53-bit uniforms, not an exact discrete Gaussian; a unit's gradient itself
is computed in floating point, and nothing here hides how long that takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.privacy.noise import Noise
from dpfed.privacy.published import show_sigma

LOSS = 1e-6  # the share by which the noise may grow
FINEST = (
    20  # bits between the noise and a step at least, so that rounding adds no variance worth naming
)
COARSEST = 51  # bits at most: noise beyond 64 bits would be cut to one number, and the sum would show its sign
COUNT_STEP = 2.0**-20  # of a count of halves, which lies on this grid already


@dataclass(frozen=True)
class Grid:
    """One client's step h, and the noise on its sum in steps."""

    step: float
    std: float


def grid_of(std: float, clip: float, size: int) -> Grid:
    """For noise `std` = σC on a sum of `size` coordinates clipped to `clip`."""
    multiplier = std / clip
    if not multiplier * math.sqrt(size) / 2 / LOSS <= 2.0**COARSEST:
        raise DpfedError(
            f"noise of {show_sigma(multiplier)} times the clip norm is too much for a grid: use a smaller sigma"
        )
    bits = max(FINEST, math.ceil(math.log2(multiplier * math.sqrt(size) / 2 / LOSS)))
    step = 2.0 ** math.floor(
        math.log2(std) - bits
    )  # a power of two: dividing by it and multiplying are exact
    return Grid(step, multiplier * sensitivity(clip, step, size) / step)


def sensitivity(clip: float, step: float, size: int) -> float:
    """How far one unit moves a sum of rounded gradients."""
    return clip + step * math.sqrt(size) / 2


def noised(total: Tensor, grids: Sequence[Grid], noise: Sequence[Noise]) -> Tensor:
    """The released sums `[S, P]` in double precision: whole numbers times h, exactly."""
    rows = []
    for row, grid, source in zip(total, grids, noise, strict=True):
        added = (source.normal64(row.shape[0]) * grid.std).round().to(torch.int64)
        rows.append((row + added).double() * grid.step)
    return torch.stack(rows)


def noised_counts(count: Tensor, std: Sequence[float], noise: Sequence[Noise]) -> Tensor:
    """Counts of halves `[S, 1]` with noise, both in whole steps; rounding is exact on the counts and costs nothing."""
    added = torch.stack(
        [source.normal64(1) * (s / COUNT_STEP) for s, source in zip(std, noise, strict=True)]
    ).round()
    return ((count / COUNT_STEP).round() + added) * COUNT_STEP

"""Noise on a grid: released sums hide the last bits of floating-point numbers (Mironov 2012).

    h = a power of two, at most 2^-k σC
    n = Σ round(ḡ_j / h) + round(σ (C + h √P / 2) z / h),  z ~ N(0, I) in float64;  released: n h

Each unit's clipped gradient is rounded before the sum. The sum and the noise are then whole numbers
of steps, so the release has no residue that differs between neighbouring data sets. Rounding moves
a coordinate by at most h/2, so one unit moves the sum by at most C + h √P / 2. The noise is scaled
to that sensitivity: the charged multiplier stays σ, and the noise grows by less than 1e-6.

Not covered: z is a rounded Gaussian of 53-bit uniforms, not an exact discrete Gaussian. Gradients
are computed in floating point, and the time that takes is not hidden.
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

# Largest relative growth of the noise.
LOSS = 1e-6
# Least and most bits between the noise and a step. Below the least, rounding adds variance; above
# the most, noise overflows 64 bits, and the release shows the sign of the sum.
LEAST_BITS = 20
MOST_BITS = 51
# Step of a count; its halves lie on this grid.
COUNT_STEP = 2.0**-20


@dataclass(frozen=True)
class Grid:
    """The step h of one client, and the standard deviation of its noise in steps."""

    step: float
    std: float


def grid_of(std: float, clip: float, size: int) -> Grid:
    """Return the grid for noise `std` = σC on a sum of `size` coordinates clipped to `clip`."""
    multiplier = std / clip
    if not multiplier * math.sqrt(size) / 2 / LOSS <= 2.0**MOST_BITS:
        raise DpfedError(
            f"noise of {show_sigma(multiplier)} times the clip norm is too much for a grid: "
            "use a smaller sigma"
        )
    bits = max(LEAST_BITS, math.ceil(math.log2(multiplier * math.sqrt(size) / 2 / LOSS)))
    # Division and multiplication by a power of two are exact.
    step = 2.0 ** math.floor(math.log2(std) - bits)
    return Grid(step, multiplier * sensitivity(clip, step, size) / step)


def sensitivity(clip: float, step: float, size: int) -> float:
    """Return how far one unit moves a sum of rounded gradients at most."""
    return clip + step * math.sqrt(size) / 2


def noised(total: Tensor, grids: Sequence[Grid], noise: Sequence[Noise]) -> Tensor:
    """Add noise to sums in steps, and return whole numbers times h in float64, `[S, P]`."""
    rows = []
    for row, grid, source in zip(total, grids, noise, strict=True):
        added = (source.normal64(row.shape[0]) * grid.std).round().to(torch.int64)
        rows.append((row + added).double() * grid.step)
    return torch.stack(rows)


def noised_counts(count: Tensor, std: Sequence[float], noise: Sequence[Noise]) -> Tensor:
    """Add noise in whole steps to counts of halves `[S, 1]`, which are whole steps themselves."""
    scales = [s / COUNT_STEP for s in std]
    added = [source.normal64(1) * scale for scale, source in zip(scales, noise, strict=True)]
    return ((count / COUNT_STEP).round() + torch.stack(added).round()) * COUNT_STEP

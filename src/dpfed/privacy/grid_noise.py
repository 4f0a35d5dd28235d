"""Noise on a grid: sums and noise are rounded to multiples of a step h before they are added.

The last bits of a noised floating-point sum can reveal something about the sum (Mironov 2012). On
a grid all released numbers are multiples of h, whatever the data are.

    h = a power of two, at most 2^-k σC, where k is between LEAST_BITS and MOST_BITS
    n = Σ round(ḡ_j / h) + round(σ (C + h √P / 2) z / h),  z ~ N(0, I) in float64

ḡ_j is the clipped gradient of unit j, with P coordinates, and σ is the noise multiplier. The
oracle releases n h. Rounding moves each coordinate of ḡ_j by at most h/2, so one unit moves the sum
by at most C + h √P / 2. The noise is scaled to this sensitivity, so the ledger still charges σ. The
standard deviation of the noise grows by less than a factor of 1 + 1e-6.

Not covered: z is computed from uniform numbers of 53 bits and then rounded, so it is no exact
discrete Gaussian. Gradients are computed in floating point, and their computing time is visible.
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

# The grid step may increase the standard deviation of the noise by at most this relative amount.
LOSS = 1e-6
# Smallest and largest k in h ≈ 2^-k σC. A smaller k adds variance by rounding. With a larger k the
# noise overflows 64-bit integers, and the released number reveals the sign of the sum.
LEAST_BITS = 20
MOST_BITS = 51
# Grid step for the counts of quantile clipping. Counts are multiples of 1/2, so they lie on it.
COUNT_STEP = 2.0**-20


@dataclass(frozen=True)
class Grid:
    """The grid step h of one client, and the standard deviation of its noise divided by h."""

    step: float
    std: float


def grid_of(std: float, clip: float, size: int) -> Grid:
    """Return the grid of one client.

    std   standard deviation σC of the noise on its sum
    clip  clip norm C
    size  number of coordinates P
    """
    multiplier = std / clip
    if not multiplier * math.sqrt(size) / 2 / LOSS <= 2.0**MOST_BITS:
        raise DpfedError(
            f"noise of {show_sigma(multiplier)} times the clip norm is too much for a grid: "
            "use a smaller sigma"
        )
    bits = max(LEAST_BITS, math.ceil(math.log2(multiplier * math.sqrt(size) / 2 / LOSS)))
    # The step is a power of two, because division and multiplication by it are then exact.
    step = 2.0 ** math.floor(math.log2(std) - bits)
    return Grid(step, multiplier * sensitivity(clip, step, size) / step)


def sensitivity(clip: float, step: float, size: int) -> float:
    """Return an upper bound on how far one unit moves a sum of rounded gradients, in L2 norm."""
    return clip + step * math.sqrt(size) / 2


def noised(total: Tensor, grids: Sequence[Grid], noise: Sequence[Noise]) -> Tensor:
    """Return the sums with noise, as multiples of each client's h, in float64 `[S, P]`.

    total  `[S, P]` int64 sums of rounded gradients, in units of h
    grids  the grid of each client
    noise  the noise source of each client
    """
    rows = []
    for row, grid, source in zip(total, grids, noise, strict=True):
        added = (source.normal64(row.shape[0]) * grid.std).round().to(torch.int64)
        rows.append((row + added).double() * grid.step)
    return torch.stack(rows)


def noised_counts(count: Tensor, std: Sequence[float], noise: Sequence[Noise]) -> Tensor:
    """Return the counts `[S, 1]` with noise that is rounded to multiples of COUNT_STEP.

    std  standard deviation of each client's count noise
    """
    scales = [s / COUNT_STEP for s in std]
    added = [source.normal64(1) * scale for scale, source in zip(scales, noise, strict=True)]
    return ((count / COUNT_STEP).round() + torch.stack(added).round()) * COUNT_STEP

"""Noise on a grid: sums and noise are rounded to multiples of a step h before they are added.

The last bits of a noised floating-point sum can reveal something about the sum (Mironov 2012). On
a grid all released numbers are multiples of h, whatever the data are.

    h = a power of two, at most 2^-k σC, where k is between LEAST_BITS and MOST_BITS
    n = Σ round(ḡ_j / h) + round(σ (C + h √P / 2) z / h),  z ~ N(0, I) in float64

ḡ_j is the clipped gradient of unit j (a record, or all records of a person), with P coordinates.
C is the clip norm and σ the noise multiplier. The released sum is n h. Rounding moves each
coordinate of ḡ_j by at most h/2, so one unit moves the sum by at most C + h √P / 2. The noise is
scaled to this sensitivity, so the privacy loss is still that of σ. The standard deviation of the
noise grows by less than a factor of 1 + 1e-6.

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

# The grid step h is so small that rounding increases the noise's standard deviation by at most this
# relative amount.
LOSS = 1e-6
# Smallest and largest k in the grid step h ≈ 2^-k σC. A smaller k adds variance by rounding. With a
# larger k, noise overflows 64-bit integers, and the released number reveals the sign of the sum.
LEAST_BITS = 20
MOST_BITS = 51
# Grid step for the counts of quantile clipping. Counts are multiples of 1/2 and of this step.
COUNT_STEP = 2.0**-20


@dataclass(frozen=True)
class Grid:
    """The noise grid of one client.

    step  grid step h: released sums are multiples of it
    std   standard deviation of the noise, in units of h
    """

    step: float
    std: float


def grid_of(std: float, clip: float, size: int) -> Grid:
    """Return the noise grid of one client: its step and its noise.

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
    # Use a power of two, because division and multiplication by it are exact.
    step = 2.0 ** math.floor(math.log2(std) - bits)
    return Grid(step, multiplier * sensitivity(clip, step, size) / step)


def sensitivity(clip: float, step: float, size: int) -> float:
    """Return the L2 sensitivity of a sum of gradients that are clipped and rounded to the grid.

    clip  clip norm C
    step  grid step h
    size  number of coordinates P
    """
    return clip + step * math.sqrt(size) / 2


def noised(total: Tensor, grids: Sequence[Grid], noise: Sequence[Noise]) -> Tensor:
    """Return the noised sums of S clients in float64 `[S, P]`, each a multiple of its grid step h.

    total  `[S, P]` int64 sums of rounded gradients of P coordinates, in units of h
    grids  the grid of each client
    noise  the noise source of each client
    """
    rows = []
    for row, grid, source in zip(total, grids, noise, strict=True):
        added = (source.normal64(row.shape[0]) * grid.std).round().to(torch.int64)
        rows.append((row + added).double() * grid.step)
    return torch.stack(rows)


def noised_counts(count: Tensor, std: Sequence[float], noise: Sequence[Noise]) -> Tensor:
    """Return the noised counts `[S, 1]` of quantile clipping, as multiples of COUNT_STEP.

    count  `[S, 1]` count of each of S clients
    std    standard deviation of the noise on each count
    noise  the noise source of each client
    """
    scales = [s / COUNT_STEP for s in std]
    added = [source.normal64(1) * scale for scale, source in zip(scales, noise, strict=True)]
    return ((count / COUNT_STEP).round() + torch.stack(added).round()) * COUNT_STEP

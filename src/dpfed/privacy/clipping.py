"""Clip the gradient of each protected unit to norm C, and add the clipped gradients per client.

A protected unit is one record, or all records of one person. Clipping rules for its gradient g:

flat         g · min(1, C/‖g‖), where ‖g‖ is the L2 norm over all trainable numbers
automatic    g · C/(‖g‖ + s) with a small constant s, so all gradients get nearly the norm C
             (Bu et al. 2023)
quantile     flat, with a C that follows a quantile of the norms over rounds (Andrew et al. 2021)

Under each rule one unit moves the sum by at most C. With `quantile` a release is a pair: the sum
and a count. A unit adds +1/2 to the count if ‖g‖ ≤ C, else -1/2, so it moves the count by 1/2. The
noise of the sum has the standard deviation σ_g·C, and the noise of the count has r·σ/2. Here σ is
the noise multiplier of the whole release, and r > 1 is a constant. The pair costs as much privacy
as one Gaussian release with multiplier σ if 1/σ² = 1/σ_g² + 1/(rσ)². The privacy ledger is charged
for σ, so the noise of the sum is chosen as σ_g = σ/√(1 − 1/r²).

`clip_and_sum` serves all ways to compute gradients: any number of records at once, a fixed number,
exact isolation of units, and rounding to a noise grid. These four cases differ only in the sum of
clipped rows (one gradient is one row): a float32 or float64 matrix product, or int64 numbers of
grid steps. One rule decides the precision in all cases:

- The squares of a row are added in float32 within pieces of the row. The pieces are added in
  float64. A piece has 256 numbers, or 4,096 in this project's GPU kernel, which adds pairwise.
- The norm and the clip factor are float32, so a clipped row has at most the norm C(1 + 1e-6).
- For float64 rows (exact isolation, grid) the squares, norm and clip factor are float64. The grid
  needs float64 because its sensitivity has no margin. Exact isolation must not round.
- A row whose squared norm is not finite in float32 contributes exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfed.accel.gradient_matrices import GradientMatrices, row_squares

ClipMode = Literal["flat", "automatic", "quantile"]
# One noise multiplier as a float, or an array with a noise multiplier for each client.
Multiplier = TypeVar("Multiplier", float, np.ndarray)
# Smallest and largest clip norm that is allowed. In float32, the squares of far smaller norms
# underflow, and the squares of far larger norms overflow.
CLIPS = (1e-12, 1e12)
# Largest change of log C (clip norm C) in a round, so that exp() cannot overflow. This is enough:
# e^100 exceeds the ratio of the largest to the smallest allowed C.
LARGEST_LOG_STEP = 100.0


@dataclass(frozen=True)
class Clipping:
    """A rule that clips gradients to the clip norm C, with its public constants.

    stability    automatic clipping: constant that is added to the norm of a gradient
    quantile     quantile clipping: wanted fraction of gradients with a norm of at most C
    rate         quantile clipping: learning rate of log C
    count_noise  quantile clipping: noise multiplier of the count, divided by that of the release;
                 above 1
    """

    mode: ClipMode = "flat"
    stability: float = 0.01
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 10.0

    @property
    def counts(self) -> bool:
        """True for quantile clipping, where each release has a count of units beside the sum."""
        return self.mode == "quantile"

    def sum_multiplier(self, multiplier: Multiplier) -> Multiplier:
        """Return the noise multiplier of the sum, given the multiplier of the whole release."""
        return multiplier / math.sqrt(1 - self.count_noise**-2) if self.counts else multiplier

    def count_std(self, multiplier: float) -> float:
        """Return the standard deviation of the noise on the count, whose sensitivity is 1/2.

        multiplier  noise multiplier of the whole release
        """
        return 0.5 * self.count_noise * multiplier

    def next_clip(self, clip: float, below: float) -> float:
        """Return the clip norm C of the next round, by quantile clipping.

        clip   C of this round
        below  noised fraction of gradients with a norm of at most C; the noise may make it negative
               or larger than 1

        This fraction is not limited to 0..1: that would shift the mean of its noise, and C would
        settle at a wrong quantile. Its difference from the quantile is limited to -1..1.
        """
        difference = min(max(below - self.quantile, -1.0), 1.0)
        log_step = min(max(-self.rate * difference, -LARGEST_LOG_STEP), LARGEST_LOG_STEP)
        return min(max(clip * math.exp(log_step), CLIPS[0]), CLIPS[1])


@dataclass(frozen=True)
class UnitRows:
    """Assigns U gradients of P numbers, one per protected unit, to the sums of S clients.

    client   `[U]` row of the sums `[S, P]` to which the gradient is added
    counts   `[U]` False (or 0) for a gradient that is not added, such as a gradient that only fills
             a computation of fixed size
    clients  number of clients S
    """

    client: Tensor
    counts: Tensor
    clients: int


def clip_and_sum(
    grads: Sequence[Tensor],
    units: UnitRows,
    clip: float | Tensor,
    rule: Clipping,
    grid_steps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each client's sum of clipped gradients `[S, P]` and its count `[S, 1]`.

    There are S clients, U units (a unit is a record, or all records of a person) and P trainable
    numbers. A unit adds +1/2 to the count of its client if the norm of its gradient is at most the
    clip norm C, else -1/2.

    grads       for each trainable tensor the gradients of all units, `[U, n]`; this function may
                overwrite numbers that are not finite with zeros
    clip        one C for all units, or `[U]` a C for each unit
    grid_steps  `[S]` grid step h of each client, for sums in int64 in units of h; None for sums
                in floating point
    """
    if grid_steps is not None:
        grads = [g.double() for g in grads]
    rows = GradientMatrices.of(grads)
    norm = row_norms(rows.matrices)
    finite = norm.isfinite()
    counted = units.counts.bool() & finite
    if not isinstance(clip, Tensor):
        clip = torch.full_like(norm, clip)
    factor = torch.where(counted, factors(norm, clip, rule), 0.0)
    member = torch.nn.functional.one_hot(units.client, units.clients).to(norm.dtype).t()
    # Overwrite NaN with zeros. A weight of zero is not enough, because zero times NaN is NaN.
    rows.clear(finite)
    if grid_steps is None:
        total = rows.weighted_sum(member * factor)
    else:
        scale = factor / grid_steps[units.client]
        total = rows.in_order([_sum_of_steps(m, scale, units) for m in rows.matrices])
    below = torch.where(counted, (norm <= clip).to(norm.dtype) - 0.5, 0.0)
    return total, member @ below.unsqueeze(1)


def _sum_of_steps(rows: Tensor, scale: Tensor, units: UnitRows) -> Tensor:
    """Return the sum of each client's gradients in grid steps, as int64 `[S, n]`.

    rows   `[U, n]` gradients, one per unit
    scale  `[U]` clip factor of each gradient divided by its client's grid step; scaled rows are
           rounded to integers
    """
    steps = (rows * scale.unsqueeze(1)).round().to(torch.int64)
    return steps.new_zeros(units.clients, rows.shape[1]).index_add_(0, units.client, steps)


def factors(norm: Tensor, clip: Tensor, rule: Clipping) -> Tensor:
    """Return for each gradient the factor that makes its norm at most the clip norm."""
    if rule.mode == "automatic":
        return clip / (norm + rule.stability)
    return torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def row_norms(matrices: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each of M gradients, `[M]`.

    Row i of all matrices together is gradient i. The top of this file describes the precision. A
    norm is infinite or NaN if its square is not finite in float32.
    """
    pieces = [row_squares(rows).sum(1, dtype=torch.float64) for rows in matrices]
    squares = torch.stack(pieces).sum(0)
    single = squares.float()
    if matrices[0].dtype != torch.float64:
        return single.sqrt()
    return torch.where(single.isfinite(), squares, math.inf).sqrt()


def finite_rows(grads: Sequence[Tensor]) -> Tensor:
    """Return a mask `[M]` of M records: True if the record's gradient has a finite norm."""
    return row_norms(GradientMatrices.of(grads).matrices).isfinite()


def unit_means(grads: Sequence[Tensor], unit: Tensor, units: int) -> tuple[list[Tensor], Tensor]:
    """Return the mean gradient of each unit over its records, and a mask `[U]`.

    The mask is False for a unit if the gradient of one of its records is not finite. This function
    may overwrite such numbers in `grads` with zeros.

    grads  for each trainable tensor the gradients of all M records, `[M, n]`
    unit   `[M]` the unit of each record, ascending; every unit has at least one record
    units  number of units U
    """
    if units == len(unit):
        return list(grads), torch.ones_like(unit, dtype=torch.bool)
    rows = GradientMatrices.of(grads)
    finite = row_norms(rows.matrices).isfinite()
    rows.clear(finite)
    precision = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    member = torch.nn.functional.one_hot(unit, units).to(precision).t()
    spoilt = member @ (~finite).to(precision)
    return [rows.weighted_sum(member / member.sum(1, keepdim=True))], spoilt == 0

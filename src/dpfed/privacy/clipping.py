"""Clip the gradient of each protected unit to norm C and add the results up per client.

Rules for the clip norm:

flat         g · min(1, C/‖g‖), one norm over all trainable numbers
automatic    g · C/(‖g‖ + s): all gradients count with about the same length (Bu et al. 2023)
quantile     flat, where C follows a quantile of the norms over rounds (Andrew et al. 2021)

Under each rule one unit moves the sum by at most C. With `quantile` a release is a pair: the sum,
and the number of units at or below C, counted as ±1/2 each. One unit moves that count by 1/2.
Relative to its own sensitivity the sum has the noise multiplier σ_g, and the count r·σ. The pair
is one Gaussian release of multiplier σ if 1/σ² = 1/σ_g² + 1/(rσ)². The ledger charges σ, so the
sum has σ_g = σ/√(1 − 1/r²).

`clip_and_sum` serves passes of any size, passes of a fixed shape, exact isolation and the noise
grid. These differ only in how clipped rows are accumulated: float32 or float64 products, or whole
steps of the grid in int64. They share one precision rule:

- Squares are added in float32 over pieces of a row, and the pieces in float64. A piece has 256
  numbers, or 4,096 added as a tree in our kernel.
- The norm and the factor are float32, so a clipped row has at most the norm C(1 + 1e-6).
- For float64 rows (exact isolation, grid) squares, norm and factor are float64. The grid states
  its sensitivity without a margin, and exact isolation sums without rounding.
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
# The noise multiplier of one client, or of many.
Multiplier = TypeVar("Multiplier", float, np.ndarray)
# Smallest and largest clip norm: float32 cannot hold the squares of far smaller or larger norms.
CLIPS = (1e-12, 1e12)
# Largest change of log C in a round; e^100 is more than the ratio of the CLIPS.
LARGEST_LOG_STEP = 100.0


@dataclass(frozen=True)
class Clipping:
    """A clipping rule with its public constants.

    stability    s of automatic clipping
    quantile     wanted share of norms at or below C
    rate         step size of log C towards that share
    count_noise  r > 1: noise multiplier of the count, divided by that of the whole release
    """

    mode: ClipMode = "flat"
    stability: float = 0.01
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 10.0

    @property
    def counts(self) -> bool:
        """True if a count is released beside the sum."""
        return self.mode == "quantile"

    def sum_multiplier(self, multiplier: Multiplier) -> Multiplier:
        """Return the noise multiplier σ_g of the sum for the multiplier σ of the release."""
        return multiplier / math.sqrt(1 - self.count_noise**-2) if self.counts else multiplier

    def count_std(self, multiplier: float) -> float:
        """Return the standard deviation of the count's noise; one unit moves it by 1/2."""
        return 0.5 * self.count_noise * multiplier

    def next_clip(self, clip: float, below: float) -> float:
        """Return C of the next round from the noised share of units at or below C in this one.

        The limits -1 and 1 are symmetric. If the share itself were limited to 0..1, the mean of its
        noise would move, and C would settle at another quantile.
        """
        difference = min(max(below - self.quantile, -1.0), 1.0)
        log_step = min(max(-self.rate * difference, -LARGEST_LOG_STEP), LARGEST_LOG_STEP)
        return min(max(clip * math.exp(log_step), CLIPS[0]), CLIPS[1])


@dataclass(frozen=True)
class UnitRows:
    """The owners of U gradients, one for each protected unit.

    client   `[U]` the client of each unit: the row of the sums that its gradient is added to
    counts   `[U]` False (or 0) for a gradient that adds nothing
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
    """Return sums of clipped gradients `[S, P]`, and counts of ±1/2 per unit `[S, 1]`.

    A unit adds +1/2 to the count of its client if its norm is at or below C, else -1/2.

    grads       for each trainable tensor the gradients of all units, `[U, n]`
    clip        one C for all units, or one for each, `[U]`
    grid_steps  `[S]` a grid step for each client: the sums are then int64 numbers of steps

    Gradients that are not finite may be overwritten with zeros.
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
    # Zero times NaN is NaN, so a weight of zero alone is not enough.
    rows.clear(finite)
    if grid_steps is None:
        total = rows.weighted_sum(member * factor)
    else:
        scale = factor / grid_steps[units.client]
        total = rows.in_order([_sum_of_steps(m, scale, units) for m in rows.matrices])
    below = torch.where(counted, (norm <= clip).to(norm.dtype) - 0.5, 0.0)
    return total, member @ below.unsqueeze(1)


def _sum_of_steps(rows: Tensor, scale: Tensor, units: UnitRows) -> Tensor:
    """Round every scaled row to whole steps, and add the rows of each client."""
    steps = (rows * scale.unsqueeze(1)).round().to(torch.int64)
    return steps.new_zeros(units.clients, rows.shape[1]).index_add_(0, units.client, steps)


def factors(norm: Tensor, clip: Tensor, rule: Clipping) -> Tensor:
    """Return the factor for each gradient that brings its norm to at most C."""
    if rule.mode == "automatic":
        return clip / (norm + rule.stability)
    return torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def row_norms(matrices: Sequence[Tensor]) -> Tensor:
    """Return the norm of each row `[M]` over all matrices, by the module's precision rule."""
    pieces = [row_squares(rows).sum(1, dtype=torch.float64) for rows in matrices]
    squares = torch.stack(pieces).sum(0)
    single = squares.float()
    if matrices[0].dtype != torch.float64:
        return single.sqrt()
    return torch.where(single.isfinite(), squares, math.inf).sqrt()


def finite_rows(grads: Sequence[Tensor]) -> Tensor:
    """Return True for each record whose gradient has a finite norm, `[M]`."""
    return row_norms(GradientMatrices.of(grads).matrices).isfinite()


def unit_means(grads: Sequence[Tensor], unit: Tensor, units: int) -> tuple[list[Tensor], Tensor]:
    """Return the mean gradient of each unit, and False for units with a non-finite record.

    grads  for each trainable tensor the gradients of all records, `[M, n]`
    unit   `[M]` the unit of each record, ascending; every unit has at least one record
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

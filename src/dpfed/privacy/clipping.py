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
Level = TypeVar("Level", float, np.ndarray)  # of one client or of many
CLIPS = (
    1e-12,
    1e12,
)  # norms are computed in single precision, where squares of far smaller or larger ones are lost


@dataclass(frozen=True)
class Clipping:
    """A clipping rule with its public constants.

    stability    s of automatic clipping
    quantile     share of the norms that should lie at or below C; `rate` is how fast log C follows
    count_noise  r: the count's noise multiplier divided by that of the whole release, > 1
    """

    mode: ClipMode = "flat"
    stability: float = 0.01
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 10.0

    @property
    def counts(self) -> bool:
        return self.mode == "quantile"

    def sum_multiplier(self, multiplier: Level) -> Level:
        """The noise multiplier of the sum alone, when sum and count together are to have `multiplier`."""
        return multiplier / math.sqrt(1 - self.count_noise**-2) if self.counts else multiplier

    def count_std(self, multiplier: float) -> float:
        """Standard deviation of the count's noise; one unit moves the count by 1/2."""
        return 0.5 * self.count_noise * multiplier

    def next_clip(self, clip: float, below: float) -> float:
        """C of the next round, from the noised share of units at or below C in this one (geometric update).

        The distance from the wanted share is cut on both sides alike: cutting the share to 0..1 would shift the mean of
        its noise, and with it the place where C settles.
        """
        away = min(max(below - self.quantile, -1.0), 1.0)
        moved = clip * math.exp(
            min(max(-self.rate * away, -100.0), 100.0)
        )  # e^100 spans CLIPS more than once
        return min(max(moved, CLIPS[0]), CLIPS[1])


@dataclass(frozen=True)
class Units:
    """The rows of a matrix of gradients, one for each protected unit.

    client   `[U]` the client that owns each unit, as a row of the sums
    counts   `[U]` False (or 0) for a row that contributes nothing
    clients  number of rows of the sums
    """

    client: Tensor
    counts: Tensor
    clients: int


def clip_and_sum(
    grads: Sequence[Tensor],
    units: Units,
    clip: float | Tensor,
    rule: Clipping,
    grid_steps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sums of clipped gradients `[S, P]`, and the counts at or below C less half, `[S, 1]`.

    grads       for each trainable tensor the gradients of all units, `[U, n]`
    clip        one C for all units, or one for each, `[U]`
    grid_steps  `[S]` a grid step for each client: the sums are then int64 numbers of steps

    Gradients of units that are not finite may be overwritten with zeros.
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
    # A weight of zero would keep NaN.
    rows.clear(finite)
    if grid_steps is None:
        total = rows.weighted_sum(member * factor)
    else:
        scale = factor / grid_steps[units.client]
        total = rows.in_order([_sum_of_steps(m, scale, units) for m in rows.matrices])
    below = torch.where(counted, (norm <= clip).to(norm.dtype) - 0.5, 0.0)
    return total, member @ below.unsqueeze(1)


def _sum_of_steps(rows: Tensor, scale: Tensor, units: Units) -> Tensor:
    """Round every scaled row before the sum: each is then a whole number of steps."""
    steps = (rows * scale.unsqueeze(1)).round().to(torch.int64)
    return steps.new_zeros(units.clients, rows.shape[1]).index_add_(0, units.client, steps)


def factors(norm: Tensor, clip: Tensor, rule: Clipping) -> Tensor:
    """Return the factor for each gradient that brings its norm to at most C."""
    if rule.mode == "automatic":
        return clip / (norm + rule.stability)
    return torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def row_norms(matrices: Sequence[Tensor]) -> Tensor:
    """Return the norms `[M]` of rows that go through all matrices; see the module's rule."""
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

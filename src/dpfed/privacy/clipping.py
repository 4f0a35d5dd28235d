"""What one protected unit may add to a sum: the clipping rules, and the threshold that follows a noised quantile.

flat         ḡ = g · min(1, C/‖g‖), one norm over all trainable numbers
automatic    ḡ = g · C/(‖g‖ + s): every gradient counts with about the same length (Bu, Wang, Zha, Karypis 2023)
quantile     flat, and C follows a quantile of the norms from round to round (Andrew, Thakkar, McMahan, Ramaswamy 2021)

Under all of them a unit moves the sum by at most C. Under `quantile` each release is a pair: the sum, and the number
of units at or below C counted as ±1/2 each, which one unit moves by 1/2. Both carry Gaussian noise. Against its own
sensitivity the sum's noise is σ_g and the count's r·σ; together they are one Gaussian release of multiplier σ when
1/σ² = 1/σ_g² + 1/(rσ)². So σ is what is charged, and the sum pays for the count with σ_g = σ/√(1 − 1/r²).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

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


def clip_and_sum(
    grads: Sequence[Tensor], unit: Tensor, owner: Tensor, clients: int, clip: float, rule: Clipping
) -> tuple[Tensor, Tensor]:
    """Sum of clipped gradients `[S, P]`, and count of units at or below C less half their number `[S, 1]`.

    grads   per record and tensor `[M, n]`; unit `[M]` the unit of each record; owner `[U]` the client of each unit
    A unit with a non-finite gradient contributes exactly zero to both (SPEC 1.4d).
    Norms, factors and sums are float64 for float64 gradients, and float32 for all others.
    """
    grads, good = by_unit(grads, unit, len(owner))
    norm = torch.stack([g.square().sum(1) for g in grads]).sum(0).sqrt()
    factor = factors(norm, clip, rule)
    units = torch.arange(len(owner), device=unit.device)
    pick = torch.zeros(clients, len(owner), dtype=norm.dtype, device=unit.device)
    pick[owner, units] = good * factor
    total = torch.cat([pick @ g for g in grads], dim=1)
    pick[owner, units] = good * ((norm <= clip).to(norm.dtype) - 0.5)
    return total, pick.sum(1, keepdim=True)


def factors(norm: Tensor, clip: float | Tensor, rule: Clipping) -> Tensor:
    """What each gradient of these norms is multiplied by, so that its norm is at most C, or at most its own C."""
    if rule.mode == "automatic":
        return clip / (norm + rule.stability)
    return torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def finite_records(grads: Sequence[Tensor]) -> Tensor:
    """Which records have a gradient whose norm is a number, `[M]`; in single precision, whatever they come in."""
    return torch.stack([g.float().square().sum(1) for g in grads]).sum(0).isfinite()


def by_unit(grads: Sequence[Tensor], unit: Tensor, units: int) -> tuple[list[Tensor], Tensor]:
    """Mean gradient of each unit per tensor `[U, n]`, and 1 for units whose records are all finite, else 0."""
    finite = finite_records(grads)
    grads = [torch.where(finite.unsqueeze(1), _at_least_single(g), 0.0) for g in grads]
    if units == len(unit):
        return grads, finite.float()
    share = torch.zeros(units, len(unit), dtype=grads[0].dtype, device=unit.device)
    share[unit, torch.arange(len(unit), device=unit.device)] = 1.0
    good = 1.0 - (share @ (~finite).to(share.dtype)).clamp(max=1.0)
    share = share / share.sum(1, keepdim=True)
    return [share @ g for g in grads], good


def _at_least_single(grads: Tensor) -> Tensor:
    return grads if grads.dtype == torch.float64 else grads.float()

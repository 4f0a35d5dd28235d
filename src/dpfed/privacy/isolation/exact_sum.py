"""Clipped sums of units with exact isolation, in passes of a fixed number of places.

A pass is computed in its full shape until each gradient is clipped. Only then are empty places
left out, because an operation on fewer rows could round the remaining rows differently. Sums are
integers (grid) or float64, so the order of the additions does not matter (privacy/clipping.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum
from dpfed.privacy.isolation.turns import Turn, turns_of
from dpfed.privacy.record_batch import RecordGradients
from dpfed.privacy.sampling import DrawnBatch

# Function that gets the client of each record of a pass `[M]` and the gradients `[M, n]`.
Watch = Callable[[np.ndarray, Sequence[Tensor]], None]


@dataclass(frozen=True)
class ExactSum:
    """Computes sums of clipped gradients `[S, P]` and counts `[S, 1]`, as `clip_and_sum`.

    gradients   computes the gradients of the records of a pass
    places      number m of places of a pass; 1 computes one record at a time
    clip        clip norm C
    rule        the clipping rule
    grid_steps  `[S]` grid step h of each client; None for sums in float64
    """

    gradients: RecordGradients
    places: int
    clip: float
    rule: Clipping
    grid_steps: Tensor | None

    def sums(
        self, theta: Tensor, batch: DrawnBatch, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of a batch. They have no noise yet.

        theta  `[S, P]` parameter vectors of the clients
        watch  called with the records' gradients of each pass; None to watch nothing
        """
        precision = torch.float64 if self.grid_steps is None else torch.int64
        total = torch.zeros_like(theta, dtype=precision)
        count = theta.new_zeros(len(theta), 1, dtype=torch.float64)
        columns = self.gradients.columns(batch)
        sizes = np.bincount(batch.unit, minlength=len(batch.owner))
        means = UnitMeans(several=len(batch.unit) > len(batch.owner))
        for turn in turns_of(batch, self.places):
            own = {name: column[turn.record] for name, column in columns.items()}
            grads = self.gradients.of_columns(theta, own)
            if watch is not None:
                watch(own["client"][turn.used], [grad[turn.used] for grad in grads])
            units = self._units(own["client"], turn, len(theta), theta.device)
            unit_sizes = torch.from_numpy(sizes[batch.unit[turn.record]]).to(theta.device)
            grads = means.add(grads, turn, unit_sizes)
            summed, counted = clip_and_sum(grads, units, self.clip, self.rule, self.grid_steps)
            total += summed
            count += counted
        return total, count

    def _units(
        self, client: np.ndarray, turn: Turn, clients: int, device: torch.device
    ) -> UnitRows:
        """Return the rows of a pass: a place counts if its unit is complete in this pass."""
        complete = torch.from_numpy(turn.used & turn.last)
        return UnitRows(torch.from_numpy(client).to(device), complete.to(device), clients)


class UnitMeans:
    """Adds the gradients of each unit in float64, pass after pass, at the place of the unit.

    The needed memory does not grow with the number of records of a unit, so a large unit cannot
    make a round fail.

    several  True if some unit has several records
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._sums: list[Tensor] = []

    def add(self, grads: Sequence[Tensor], turn: Turn, sizes: Tensor) -> list[Tensor]:
        """Add the gradients `[m, n]` of a pass; return the mean gradients in float64.

        The mean at a place is right if the last record of the place's unit is in this pass.

        sizes  `[m]` number of records of each place's unit
        """
        exact = [grad.double() for grad in grads]
        if not self._several:
            return exact
        if self._sums:
            begins = torch.from_numpy(turn.first).to(sizes.device).unsqueeze(1)
            # Choose by `where`: a product with zero would keep NaN of the place's last unit.
            exact = [
                torch.where(begins, grad, summed + grad)
                for summed, grad in zip(self._sums, exact, strict=True)
            ]
        self._sums = exact
        return [summed / sizes.unsqueeze(1) for summed in exact]

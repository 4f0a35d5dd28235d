"""Clipped sums of units with exact isolation, in passes of a fixed number of places.

A pass is computed in its full shape until each gradient is clipped. Only then are empty places
left out, because an operation on fewer rows could round the remaining rows differently. Sums are
integers (grid) or float64, so the order of the additions does not matter (privacy/clipping.py).

Memory follows from the shape of a pass alone. If it also followed from the batch, one more unit
could exhaust it, and the smaller passes after that would round all other gradients differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    kinds       number of kinds of places, a divisor of m (privacy/isolation/turns.py)
    clip        clip norm C
    rule        the clipping rule
    grid_steps  `[S]` grid step h of each client; None for sums in float64
    several     True if a unit can have several records, whatever batch is drawn
    """

    gradients: RecordGradients
    places: int
    kinds: int
    clip: float
    rule: Clipping
    grid_steps: Tensor | None
    several: bool = False

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
        several = self.several or len(batch.unit) > len(batch.owner)
        buffer = theta.new_zeros(self.places if several else 0, theta.shape[1], dtype=torch.float64)
        means = UnitMeans(buffer, sizes[batch.unit])
        kinds = self.places if several else self.kinds
        for turn in turns_of(batch, self.places, kinds):
            own = {name: column[turn.record] for name, column in columns.items()}
            summed, counted = self._pass(theta, own, turn, means, watch)
            total += summed
            count += counted
            del summed, counted
        return total, count

    def _pass(
        self,
        theta: Tensor,
        own: Mapping[str, np.ndarray],
        turn: Turn,
        means: UnitMeans,
        watch: Watch | None,
    ) -> tuple[Tensor, Tensor]:
        """Return sums and counts of one pass. None of its gradients stays in memory.

        own  the columns of the records of the pass
        """
        grads = self.gradients.of_columns(theta, own)
        if watch is not None:
            watch(own["client"][turn.used], [grad[turn.used] for grad in grads])
        units = self._units(own["client"], turn, len(theta), theta.device)
        return clip_and_sum(means.add(grads, turn), units, self.clip, self.rule, self.grid_steps)

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

    sums   float64 zeros `[m, P]`; `[0, P]` if each unit has one record
    sizes  for each record of the batch, the number of records of its unit
    """

    def __init__(self, sums: Tensor, sizes: np.ndarray) -> None:
        self._sums = sums
        self._sizes = sizes

    def add(self, grads: Sequence[Tensor], turn: Turn) -> list[Tensor]:
        """Add the gradients `[m, n]` of a pass; return the mean gradients in float64.

        The mean at a place is right if the last record of the place's unit is in this pass.
        """
        if not len(self._sums):
            return [grad.double() for grad in grads]
        device = self._sums.device
        begins = torch.from_numpy(turn.first).to(device).unsqueeze(1)
        sizes = torch.from_numpy(self._sizes[turn.record]).to(device).unsqueeze(1)
        sums = torch.split(self._sums, [grad.shape[1] for grad in grads], 1)
        for summed, grad in zip(sums, grads, strict=True):
            # Choose by `where`: a product with zero would keep NaN of the place's last unit.
            summed.copy_(torch.where(begins, grad.double(), summed + grad))
        return [summed / sizes for summed in sums]

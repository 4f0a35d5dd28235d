"""Sum clipped gradients of units with exact isolation, in passes of a fixed number of places.

A unit is one record, or all records of one person. With exact isolation, no unit changes another
unit's gradient, not even by rounding. A pass is one forward and backward computation of several
records, and a place is the position of one record in it.

A pass is computed in its full shape until each gradient is clipped. Only then are empty places
left out, because an operation on fewer rows could round the remaining rows differently. Sums are
integers (multiples of a grid step) or float64, so the order of the additions does not matter.

The needed memory depends only on the shape of a pass. If it depended on the batch too, one more
unit could exhaust it. Smaller passes would follow and round all other gradients differently.
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

# Function that gets the clients `[M]` of the M records of a pass, and their gradients `[M, n]` for
# each trainable tensor of n numbers.
Watch = Callable[[np.ndarray, Sequence[Tensor]], None]


@dataclass(frozen=True)
class ExactSum:
    """Computes sums of clipped gradients with exact isolation, `[S, P]`, and counts `[S, 1]`.

    S is the number of clients and P the number of trainable parameters. A count adds +1/2 for each
    unit with a gradient norm of at most C, else -1/2 (see `clip_and_sum`).

    gradients   computes the gradients of the records of a pass
    places      number m of places of a pass; 1 computes one record at a time
    clip        clip norm C
    rule        the clipping rule
    grid_steps  `[S]` grid step of each client, of which sums are integer multiples; None for sums
                in float64
    several     True if units of this run can have several records
    """

    gradients: RecordGradients
    places: int
    clip: float
    rule: Clipping
    grid_steps: Tensor | None
    several: bool = False

    def sums(
        self, theta: Tensor, batch: DrawnBatch, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of clipped gradients `[S, P]` and the counts `[S, 1]` of a batch.

        They have no noise yet, so only the oracle may use them.

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
        for turn in turns_of(batch, self.places):
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
        """Return each client's sum of clipped gradients and its count, for the records of one pass.

        The gradients are freed when the method returns.

        own  for the record at each place: its index, its client and the random keys of its dropout
             and augmentations, by column name
        """
        grads = self.gradients.of_columns(theta, own)
        if watch is not None:
            watch(own["client"][turn.used], [grad[turn.used] for grad in grads])
        units = self._units(own["client"], turn, len(theta), theta.device)
        return clip_and_sum(means.add(grads, turn), units, self.clip, self.rule, self.grid_steps)

    def _units(
        self, client: np.ndarray, turn: Turn, clients: int, device: torch.device
    ) -> UnitRows:
        """Return the client of the record at each place, and a mask of complete units.

        The mask is True at a place with the last record of a unit. Only then is the unit's mean
        gradient complete, so that it may be added to the sum.
        """
        complete = torch.from_numpy(turn.used & turn.last)
        return UnitRows(torch.from_numpy(client).to(device), complete.to(device), clients)


class UnitMeans:
    """Computes each unit's mean gradient by adding its gradients in float64, pass after pass.

    All records of a unit (one record, or all records of one person) are at the same place. The
    needed memory does not grow with a unit's records, so a large unit cannot make a round fail.

    sums   float64 zeros `[m, P]`, one row for each place; `[0, P]` if each unit has one record
    sizes  for each record of the batch, the number of records of its unit
    """

    def __init__(self, sums: Tensor, sizes: np.ndarray) -> None:
        self._sums = sums
        self._sizes = sizes

    def add(self, grads: Sequence[Tensor], turn: Turn) -> list[Tensor]:
        """Add the gradients of a pass at its m places; return the mean gradients in float64.

        The mean at a place is complete if the place holds the last record of its unit.

        grads  `[m, n]` for each trainable tensor of n numbers
        """
        if not len(self._sums):
            return [grad.double() for grad in grads]
        device = self._sums.device
        begins = torch.from_numpy(turn.first).to(device).unsqueeze(1)
        sizes = torch.from_numpy(self._sizes[turn.record]).to(device).unsqueeze(1)
        sums = torch.split(self._sums, [grad.shape[1] for grad in grads], 1)
        for summed, grad in zip(sums, grads, strict=True):
            # Use `where`: multiplying by zero would keep a NaN of the unit that was here before.
            summed.copy_(torch.where(begins, grad.double(), summed + grad))
        return [summed / sizes for summed in sums]

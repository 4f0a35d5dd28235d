"""The oracle: the only code that reads private records, and releases only noised sums of them.

    draw a batch -> per-record gradients -> clip and sum -> add noise -> divide by expected batch

The plan's `Mechanism` states how batches are drawn, clipped and noised. The ledger charges that
mechanism, and the oracle refuses any release beyond it. See docs/algorithms.md (The private
gradient) and docs/privacy.md (The mechanism).

If a pass does not fit into memory, the oracle computes the same batch in smaller passes. It draws
nothing again, so the memory of the machine does not influence a release.

Isolation of units. The bound C on one unit's part of the sum needs all other gradients to stay
bitwise equal when the unit is removed. Kernels round differently for other batch sizes, so a pass
over several units does not have this property.

exact  Each pass holds one record and its augmentations. Its gradient is a function of the record,
       its keys and theta. Sums are whole numbers (grid) or float64.
fast   A pass holds many units. At thetas of honest training the other gradients change by less
       than 1e-6 C; at a theta that an attacker chooses they can change by many times C.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dpfed.privacy.clipping import UnitRows, clip_and_sum, finite_rows, unit_means
from dpfed.privacy.fixed_shape_sum import Sums
from dpfed.privacy.grid_noise import Grid, grid_of, noised, noised_counts
from dpfed.privacy.noise import Noise, Streams
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, RecordGradients
from dpfed.privacy.sampling import DrawnBatch, batches, joined_batch

__all__ = [
    "PRIVATE",
    "FleetOracle",
    "Isolation",
    "PassLimits",
    "PrivateData",
    "RoundTerms",
    "free",
    "out_of_memory",
]

# Messages of this logger are private. Its own level keeps them out of a program that logs
# everything; a user who wants them sets the level of this logger by name.
PRIVATE = logging.getLogger("dpfed.private")
PRIVATE.setLevel(logging.WARNING)
Isolation = Literal["exact", "fast"]
OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "not enough memory",
    "can't allocate",
    "cannot allocate",
    "alloc_failed",
)


def out_of_memory(error: BaseException) -> bool:
    """Return True if the device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY_WORDS)


def free(device: torch.device) -> None:
    """Return cached memory to the device; torch keeps the memory of a failed pass otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class RoundTerms:
    """The public terms of one round: its plan, its clients, and local steps as charged."""

    plan: Plan
    streams: Streams
    round: int
    clients: Sequence[int]
    steps: int
    grid: bool = False
    isolation: Isolation = "fast"


@dataclass(frozen=True)
class PassLimits:
    """Rows in one pass, and a sum over passes of a fixed shape to use where possible."""

    max_slots: int = 512
    fixed: Sums | None = None


DEFAULT_LIMITS = PassLimits()


class FleetOracle:
    """The oracle of S clients in one round, for as many batches and releases as were charged."""

    def __init__(
        self,
        data: PrivateData,
        terms: RoundTerms,
        limits: PassLimits = DEFAULT_LIMITS,
        noise: Sequence[Noise] | None = None,
        wait_for_charge: Callable[[], None] = lambda: None,
        admit: Callable[[Tensor], None] = lambda theta: None,
    ) -> None:
        """
        noise            noise of the clients, where the steps of a round are computed again
        wait_for_charge  returns once the charge is on the disk; called before every release
        admit            called with theta `[S, P]` before gradients are computed; may raise
        """
        plan = terms.plan
        clients = list(terms.clients)
        self._data = data
        self._plan = plan
        self._round = terms.round
        self._clients = clients
        self._device = data.records.labels.device
        self._exact = terms.isolation == "exact"
        self._wait_for_charge = wait_for_charge
        self._admit = admit
        self.max_slots = limits.max_slots
        self.fixed = None if self._exact else limits.fixed
        self._batches = [
            batches(plan, i, terms.streams.generator("batch", terms.round, i)) for i in clients
        ]
        # Fresh noise for steps that are computed again would be a second draw.
        self._noise = list(
            noise or [terms.streams.noise(terms.round, i, self._device) for i in clients]
        )
        self._gradients = RecordGradients(data, terms.streams, terms.round, clients)
        self._std = self._column([plan.noise_std(i) for i in clients])
        self._count_std = self._column([plan.count_std(i) for i in clients])
        self._expected = self._column([float(plan.expected[i]) for i in clients])
        self.phi = self._column([plan.phi(i) for i in clients])
        self._grid = self._grids() if terms.grid else None
        self._batch: DrawnBatch | None = None
        self._below = torch.zeros_like(self.phi)
        self._counted = 0
        self._drawn = 0
        self._released = 0
        self._allowed = terms.steps * plan.batches

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return noised mean gradients `[S, P]` on fresh batches, and their noise variance."""
        if self._drawn >= self._allowed:
            raise RuntimeError(
                f"the ledger was charged for {self._allowed} batches in this round: "
                "no further one is drawn"
            )
        self._batch = self._draw()
        self._drawn += 1
        self._released = 0
        return self._release(theta, self._batch)

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Release the batch that was drawn last once more, with fresh noise."""
        if self._batch is None or self._released >= self._plan.releases:
            raise RuntimeError(
                f"the ledger was charged for {self._plan.releases} release(s) of a batch: "
                "declare more in `releases`"
            )
        return self._release(theta, self._batch)

    @property
    def drawn(self) -> int:
        """The number of batches drawn so far; at the end of a round, the number charged."""
        return self._drawn

    @property
    def noise(self) -> list[Noise]:
        """The noise of the clients, each from its first number on."""
        return [noise.again() for noise in self._noise]

    @property
    def below(self) -> Tensor:
        """Noised share of units at or below C, the mean over all releases so far, `[S, 1]`."""
        return self._below / max(1, self._counted)

    def _draw(self) -> DrawnBatch:
        positions = [next(fresh) for fresh in self._batches]
        return joined_batch(self._data.units, self._clients, positions, self._drawn)

    def _release(self, theta: Tensor, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        self._admit(theta)
        self._released += 1
        total, count = self._add_noise(*self._sum_that_fits(theta, batch))
        self._wait_for_charge()
        if self._plan.clipping.counts:
            # The divisor is the expected batch: the size of the drawn one is private.
            self._below = self._below + 0.5 + count / self._expected
            self._counted += 1
        return total / self._expected, self.phi

    def _sum_that_fits(self, theta: Tensor, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        """Return the clipped sum; while memory runs out, halve the records in a pass."""
        while True:
            try:
                return self._clipped_sum(theta, batch)
            except Exception as error:
                # The limit is halved for any batch: one that follows the batch shows its size.
                if not out_of_memory(error) or (self.fixed is None and self._records_per_pass == 1):
                    raise
            # Outside the handler, which holds the memory of the failed pass.
            if self.fixed is not None:
                self.fixed = None
            else:
                self.max_slots //= 2
            free(self._device)

    def _clipped_sum(self, theta: Tensor, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        """Return sums of clipped gradients of units `[S, P]`, and the counts at or below C.

        These have no noise, so they must not leave this class.
        """
        plan = self._plan
        if self.fixed is not None and self._can_be_fixed(batch):
            return self.fixed.sums(theta, self._gradients.columns(batch), plan.clip)
        # In float32 the rounding of a sum would depend on the units that were added before.
        precision = torch.float64 if self._exact else torch.float32
        total = torch.zeros_like(theta, dtype=precision if self._grid is None else torch.int64)
        count = torch.zeros_like(self.phi, dtype=precision)
        steps = self._grid_steps()
        for part in batch.chunks(self._records_per_pass):
            grads, finite = self._unit_gradients(theta, part)
            rows = UnitRows(self._to_device(part.owner), finite, len(theta))
            summed, counted = clip_and_sum(grads, rows, plan.clip, plan.clipping, steps)
            total = total + summed
            count = count + counted
        return total, count

    def _unit_gradients(self, theta: Tensor, part: DrawnBatch) -> tuple[list[Tensor], Tensor]:
        """Return the mean gradient of each unit, and False for units that count as zero."""
        if self._exact:
            grads = self._gradients.of_unit(theta, part)
            part = part.single(0)
        else:
            grads = self._gradients.of_records(theta, self._to_device(part.client), part)
        if PRIVATE.isEnabledFor(logging.DEBUG):
            self._log_lost(part, grads)
        return unit_means(grads, self._to_device(part.unit), len(part.owner))

    @property
    def _records_per_pass(self) -> int:
        """The number of records whose augmentations are at most `max_slots` rows.

        With exact isolation it is 1, so `DrawnBatch.chunks` gives one unit at a time.
        """
        return 1 if self._exact else max(1, self.max_slots // self._gradients.augmentations)

    def _can_be_fixed(self, batch: DrawnBatch) -> bool:
        """Return True if each unit is one record, summed in float32, and none is to be logged."""
        single = len(batch.unit) == len(batch.owner)
        return single and self._grid is None and not PRIVATE.isEnabledFor(logging.DEBUG)

    def _log_lost(self, part: DrawnBatch, grads: Sequence[Tensor]) -> None:
        lost = part.client[~finite_rows(grads).cpu().numpy()]
        counts = np.bincount(lost, minlength=len(self._clients))
        for client, count in zip(self._clients, counts, strict=True):
            if count:
                PRIVATE.debug(
                    "round %d, batch %d, client %d: "
                    "the gradient of %d record(s) is not finite and counts as zero",
                    self._round,
                    self._drawn,
                    client,
                    count,
                )

    def _add_noise(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Add each client's noise to its sum, and to its count where one is released."""
        counts = self._plan.clipping.counts
        if self._grid is not None:
            total = noised(total, self._grid, self._noise)
            if counts:
                count = noised_counts(count, self._count_std[:, 0].tolist(), self._noise)
            return total.float(), count.float()
        # The standard deviation of no noise is exactly 0, also for C = inf.
        if self._plan.multipliers.any():
            # In place: nobody else holds the sum, and one pass over memory is enough.
            total = total.addcmul_(self._std.to(total.dtype), self._normal(total))
            if counts:
                count = count.addcmul_(self._count_std.to(count.dtype), self._normal(count))
        return total.float(), count.float()

    def _normal(self, like: Tensor) -> Tensor:
        """Return the next normal numbers of all clients, a row for each."""
        rows = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        for row, noise in zip(rows, self._noise, strict=True):
            noise.fill(row)
        return rows.to(like.dtype)

    def _grids(self) -> list[Grid]:
        plan = self._plan
        if not plan.multipliers.all():
            raise ValueError("a grid is for sums with noise")
        size = sum(shape.numel() for shape in self._data.gradients.space.shapes)
        return [grid_of(plan.noise_std(i), plan.clip, size) for i in self._clients]

    def _grid_steps(self) -> Tensor | None:
        if self._grid is None:
            return None
        steps = [grid.step for grid in self._grid]
        return torch.tensor(steps, dtype=torch.float64, device=self._device)

    def _column(self, values: list[float]) -> Tensor:
        # A blocking copy would wait for all work of the device at the start of a round.
        column = torch.tensor(values, dtype=torch.float64).unsqueeze(1).to(torch.float32)
        return column.to(self._device, non_blocking=True)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

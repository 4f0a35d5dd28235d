"""The oracle: the only code that reads private records. It releases only noised gradients.

    draw a batch -> per-record gradients -> clip and sum -> add noise -> divide by expected batch

The plan's `Mechanism` states how batches are drawn, clipped and noised. The ledger is charged for
that mechanism, and the oracle refuses any release that was not charged. See docs/algorithms.md (The
private gradient) and docs/privacy.md (The mechanism).

A pass is one forward and backward computation of several records. If a pass does not fit into
memory, the oracle computes the same batch in smaller passes. It does not draw another batch, so
batches do not depend on the memory of the machine.

Isolation of units (one record, or all records of one person). Removing one unit must not change the
sum of clipped gradients by more than the clip norm C. Therefore the gradients of all other units
must stay bitwise equal. A pass over several units does not ensure this, because kernels round
differently for different batch sizes. Two settings exist:

exact  Each pass has a fixed number of places for records, and every unit draws its place at random.
       A record's gradient then depends only on this record, its random keys, its place and the
       parameters theta (see privacy/isolation/turns.py). Sums are integers (grid) or float64.
fast   A pass holds many units. In honest training, removing a unit changes the gradients of other
       units by less than 1e-6 C. An attacker who chooses theta can raise this change to several C.
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
from dpfed.privacy.isolation.exact_sum import ExactSum
from dpfed.privacy.noise import Noise, Streams
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, RecordGradients
from dpfed.privacy.sampling import DrawnBatch, batches, joined_batch

# The messages of this logger reveal private data. To see them, the user must set the level of this
# logger by its name. A level that is set for all loggers does not enable them.
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
    """Return True if this error says that the device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY_WORDS)


def free(device: torch.device) -> None:
    """Give torch's unused cached memory back to a GPU; on other devices do nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class RoundTerms:
    """The settings of one round; none of them depends on records.

    plan       how each client draws, clips and noises its batches (its mechanism)
    streams    random streams of the run
    round      number of the round
    clients    numbers of the S clients, in the order of the rows of theta
    steps      local steps for which the ledger is charged
    grid       True if sums and noise are integers times a grid step (privacy/grid_noise.py)
    isolation  how strictly units are separated; see the top of this file
    """

    plan: Plan
    streams: Streams
    round: int
    clients: Sequence[int]
    steps: int
    grid: bool = False
    isolation: Isolation = "fast"


@dataclass(frozen=True)
class PassLimits:
    """Limits of one pass, a forward and backward computation of several records.

    max_slots  most rows in one pass; a record has one row for each of its augmentations
    fixed      computes sums in passes of a fixed shape, for batches that allow it; None to use
               passes of varying size for all batches
    places     number of records in each pass of exact isolation; a number above 1 must be the one
               that `settle_places` tested for this model
    """

    max_slots: int = 512
    fixed: Sums | None = None
    places: int = 1


DEFAULT_LIMITS = PassLimits()


class FleetOracle:
    """Draws batches of S clients in one round and releases only their noised gradients.

    It refuses batches and releases for which the ledger was not charged.
    """

    def __init__(
        self,
        data: PrivateData,
        terms: RoundTerms,
        limits: PassLimits = DEFAULT_LIMITS,
        noise: Sequence[Noise] | None = None,
        wait_for_charge: Callable[[], None] = lambda: None,
        admit: Callable[[Tensor], None] = lambda theta: None,
    ) -> None:
        """Prepare the random streams and constants of the round, without drawing a batch.

        noise            noise sources of a failed round that is computed again; None for new ones
        wait_for_charge  blocks until the charge is on disk; the oracle calls it before each release
        admit            called with theta `[S, P]` before its use; may raise an error to refuse it
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
        self.places = limits.places if self._exact else 1
        self.fixed = None if self._exact else limits.fixed
        self._batches = [
            batches(plan, i, terms.streams.generator("batch", terms.round, i)) for i in clients
        ]
        self._place_draws = _place_draws(terms)
        # If a failed round is computed again, its noise must be the same: new noise would make it
        # a second release, which is not charged.
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
        """Draw new batches; return noised mean gradients `[S, P]` and noise variances `[S, 1]`.

        theta  `[S, P]` parameter vectors at which the clients' gradients are computed
        """
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
        """Return noised mean gradients of the last batch at another `theta`, and noise variances.

        The noise is new, and the shapes are those of `__call__`. The plan's `releases` limits how
        often one batch is used, because every use costs privacy.
        """
        if self._batch is None or self._released >= self._plan.releases:
            raise RuntimeError(
                f"the ledger was charged for {self._plan.releases} release(s) of a batch: "
                "declare more in `releases`"
            )
        return self._release(theta, self._batch)

    @property
    def drawn(self) -> int:
        """The number of batches that each client has drawn so far in this round."""
        return self._drawn

    @property
    def noise(self) -> list[Noise]:
        """New noise sources that repeat the noise of this round from its start, one per client."""
        return [noise.again() for noise in self._noise]

    @property
    def below(self) -> Tensor:
        """The noised fraction of units whose gradient norm is at most C, per client, `[S, 1]`.

        Quantile clipping adapts C by it. It is the mean over this round's releases, at first 0.
        """
        return self._below / max(1, self._counted)

    def _draw(self) -> DrawnBatch:
        positions = [next(fresh) for fresh in self._batches]
        places = [np.zeros(len(units), dtype=np.int64) for units in positions]
        for i, draws in enumerate(self._place_draws):
            places[i] = draws.integers(self.places, size=len(places[i]))
        return joined_batch(self._data.units, self._clients, positions, places, self._drawn)

    def _release(self, theta: Tensor, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        """Return the clients' noised mean gradients of a batch at `theta`, and noise variances.

        If memory runs out, compute the batch again in smaller passes. Raise the out-of-memory error
        if a pass of one record does not fit either.
        """
        self._admit(theta)
        self._released += 1
        sums: tuple[Tensor, Tensor] | None = None
        while sums is None:
            try:
                sums = self._clipped_sum(theta, batch)
            except Exception as error:
                if not out_of_memory(error) or self._smallest_passes:
                    raise
            # Free memory only here: the exception keeps the memory of the failed pass alive until
            # the except block ends.
            if sums is None:
                self._use_smaller_passes()
        total, count = self._add_noise(*sums)
        self._wait_for_charge()
        if self._plan.clipping.counts:
            # Divide by the expected batch size, because the size of the drawn batch is private.
            self._below = self._below + 0.5 + count / self._expected
            self._counted += 1
        return total / self._expected, self.phi

    def _use_smaller_passes(self) -> None:
        """Lower the limits of a pass for this batch and all later batches, and free unused memory.

        The new limits must not depend on the batch, because they would reveal its private size.
        """
        if self.fixed is not None:
            self.fixed = None
        elif self._exact:
            # Compute one record at a time: no other number of places was tested for this model.
            self.places = 1
        else:
            self.max_slots //= 2
        free(self._device)

    @property
    def _smallest_passes(self) -> bool:
        """True if each pass has only one record already."""
        if self._exact:
            return self.places == 1
        return self.fixed is None and self._records_per_pass == 1

    def _clipped_sum(self, theta: Tensor, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        """Return the clients' sums of clipped gradients `[S, P]` and their counts `[S, 1]`.

        A count adds +1/2 for each unit with a gradient norm of at most C, else -1/2. Sums and
        counts have no noise yet, so they must not leave this class.
        """
        plan = self._plan
        if self.fixed is not None and self._can_be_fixed(batch):
            return self.fixed.sums(theta, self._gradients.columns(batch), plan.clip)
        steps = self._grid_steps()
        if self._exact:
            several = plan.unit != "record"
            exact = ExactSum(self._gradients, self.places, plan.clip, plan.clipping, steps, several)
            return exact.sums(theta, batch, self._log_lost if self._logs_lost else None)
        total = torch.zeros_like(theta, dtype=torch.float32 if steps is None else torch.int64)
        count = torch.zeros_like(self.phi)
        for part in batch.chunks(self._records_per_pass):
            grads, finite = self._unit_gradients(theta, part)
            rows = UnitRows(self._to_device(part.owner), finite, len(theta))
            summed, counted = clip_and_sum(grads, rows, plan.clip, plan.clipping, steps)
            total = total + summed
            count = count + counted
        return total, count

    def _unit_gradients(self, theta: Tensor, part: DrawnBatch) -> tuple[list[Tensor], Tensor]:
        """Return the mean gradients of the batch's U units (records or persons), and a mask `[U]`.

        The mask is False for a unit whose gradient is not finite; its gradient counts as zero.
        """
        grads = self._gradients.of_records(theta, part)
        if self._logs_lost:
            self._log_lost(part.client, grads)
        return unit_means(grads, self._to_device(part.unit), len(part.owner))

    @property
    def _records_per_pass(self) -> int:
        """The number of records in one pass: at least 1, and if possible at most `max_slots` rows.

        For passes of varying size only; passes of exact isolation have `places` records.
        """
        return max(1, self.max_slots // self._gradients.augmentations)

    @property
    def _logs_lost(self) -> bool:
        return PRIVATE.isEnabledFor(logging.DEBUG)

    def _can_be_fixed(self, batch: DrawnBatch) -> bool:
        """Return True if passes of a fixed shape (`self.fixed`) can compute this batch.

        Three conditions must hold: each unit has one record, sums are in float32 (no noise grid),
        and the log does not count records whose gradient is not finite.
        """
        single = len(batch.unit) == len(batch.owner)
        return single and self._grid is None and not self._logs_lost

    def _log_lost(self, client: np.ndarray, grads: Sequence[Tensor]) -> None:
        lost = client[~finite_rows(grads).cpu().numpy()]
        counts = np.bincount(lost, minlength=len(self._clients))
        for number, count in zip(self._clients, counts, strict=True):
            if count:
                PRIVATE.debug(
                    "round %d, batch %d, client %d: "
                    "the gradient of %d record(s) is not finite and counts as zero",
                    self._round,
                    self._drawn,
                    number,
                    count,
                )

    def _add_noise(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return noised sums and counts in float32; counts get noise only if they are released."""
        counts = self._plan.clipping.counts
        if self._grid is not None:
            total = noised(total, self._grid, self._noise)
            if counts:
                count = noised_counts(count, self._count_std[:, 0].tolist(), self._noise)
            return total.float(), count.float()
        # Without noise, C may be infinite. A client without noise has a standard deviation of
        # exactly 0, not 0 times infinity, so its sum stays unchanged.
        if self._plan.multipliers.any():
            # Add in place: nobody else uses the sum, and a copy would cost memory and time.
            total = total.addcmul_(self._std.to(total.dtype), self._normal(total))
            if counts:
                count = count.addcmul_(self._count_std.to(count.dtype), self._normal(count))
        return total.float(), count.float()

    def _normal(self, like: Tensor) -> Tensor:
        """Return new standard normal noise in the shape of `like`, which has one row per client."""
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
        # Copy without blocking: a blocking copy waits until the device has finished all its work.
        column = torch.tensor(values, dtype=torch.float64).unsqueeze(1).to(torch.float32)
        return column.to(self._device, non_blocking=True)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _place_draws(terms: RoundTerms) -> list[np.random.Generator]:
    """Return a generator per client that draws its units' places; [] if isolation is "fast"."""
    if terms.isolation != "exact":
        return []
    return [terms.streams.generator("place", terms.round, i) for i in terms.clients]

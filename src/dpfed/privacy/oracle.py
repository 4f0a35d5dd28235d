"""The DP gradient oracle: the only place where private records are touched (SPEC 1.4).

    draw a batch -> per-sample gradients -> clip each by one norm -> sum -> add noise -> divide by the expected batch

What is drawn, clipped and added follows from the plan's `Mechanism`, which is also what the ledger has charged; the
oracle refuses any release beyond it. Only noised values leave it.

Where the device has no room for a pass, the same draw is computed in smaller passes; nothing is drawn for it again, so
which batches fit can have no part in what is released.

Isolation of units. The bound C on what one unit adds to the sum needs every other unit's gradient
to stay bitwise the same when the unit is removed. Kernels round differently for other batch sizes,
so a pass over several units does not give that.

exact  One record, with its augmentations, is one pass of its own. Its gradient is a function of
       the record, its keys and theta. Sums are whole numbers (grid) or float64.
fast   Passes hold many units. At thetas of honest training the gradients of the others move by
       less than 1e-6 C; at a theta chosen by an attacker they can move by many times C.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dpfed.privacy.clipping import Units, clip_and_sum, finite_rows, unit_means
from dpfed.privacy.fixed_shape_sum import Sums
from dpfed.privacy.grid_noise import Grid, grid_of, noised, noised_counts
from dpfed.privacy.noise import Noise, Streams
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import (
    Augmentations,
    Gradients,
    Holdings,
    Records,
    augmentation_keys,
    each_augmentation,
    mean_over_augmentations,
)
from dpfed.privacy.sampling import batches

# What is said here is private and stays with the client. It has a level of its own, so that a program which logs
# everything does not get it by accident: whoever wants it asks for this logger by name.
PRIVATE = logging.getLogger("dpfed.private")
PRIVATE.setLevel(logging.WARNING)
Isolation = Literal["exact", "fast"]
NO_ROOM = (
    "out of memory",
    "not enough memory",
    "can't allocate",
    "cannot allocate",
    "alloc_failed",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is a device or machine that has no room left; torch says so in several ways."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in NO_ROOM)


@dataclass(frozen=True)
class Slots:
    """The records of one drawn batch of the whole fleet, one after another.

    row     which record                     unit    which protected unit of this batch (0..U-1), ascending
    client  which row of theta `[S, P]`      owner   the row of theta that each unit belongs to, `[U]`
    """

    row: np.ndarray
    client: np.ndarray
    unit: np.ndarray
    owner: np.ndarray
    key: np.ndarray

    def chunks(self, limit: int) -> list[Slots]:
        """Pieces of at most `limit` records; a unit is never cut, so a larger unit makes a larger piece."""
        out: list[Slots] = []
        counts = np.bincount(self.unit, minlength=len(self.owner))
        first = 0
        ends = np.cumsum(counts)
        while first < len(self.owner):
            base = ends[first] - counts[first]
            last = max(first + 1, int(np.searchsorted(ends, base + limit, side="right")))
            part = slice(base, ends[last - 1])
            out.append(
                Slots(
                    self.row[part],
                    self.client[part],
                    self.unit[part] - first,
                    self.owner[first:last],
                    self.key[part],
                )
            )
            first = last
        return out

    def single(self, i: int) -> Slots:
        """Return record i alone, as a unit of its own."""
        only = slice(i, i + 1)
        zero = np.zeros(1, dtype=np.int64)
        return Slots(self.row[only], self.client[only], zero, self.client[only], self.key[only])


class FleetOracle:
    """The oracle of S clients in one round. It can be asked for K steps of what the plan's mechanism declares, no more."""

    def __init__(
        self,
        gradients: Gradients,
        records: Records,
        holdings: Holdings,
        plan: Plan,
        streams: Streams,
        round: int,
        clients: Sequence[int],
        steps: int,
        max_slots: int = 512,
        view: Augmentations | None = None,
        fixed: Sums | None = None,
        noise: Sequence[Noise] | None = None,
        grid: bool = False,
        wait_for_charge: Callable[[], None] = lambda: None,
        isolation: Isolation = "fast",
        admit: Callable[[Tensor], None] = lambda theta: None,
    ) -> None:
        """`admit` sees every theta `[S, P]` before a gradient is computed at it, and may raise."""
        self._gradients, self._records, self._holdings, self._plan = (
            gradients,
            records,
            holdings,
            plan,
        )
        self._clients = list(clients)
        self._device = records.labels.device
        self._batches = [
            batches(plan, i, streams.generator("batch", round, i)) for i in self._clients
        ]
        # `noise` is given where this round's steps are run again: fresh noise would be a second draw.
        self._noise = (
            list(noise) if noise else [streams.noise(round, i, self._device) for i in self._clients]
        )
        self._round, self._view, self._views = round, view, 1 if view is None else view.count
        self._dropout = (
            [streams.number("dropout", round, i) for i in self._clients]
            if gradients.has_dropout
            else None
        )
        self._augment = (
            [streams.number("augment", round, i) for i in self._clients]
            if view is not None
            else None
        )
        self.max_slots = max_slots
        self._exact = isolation == "exact"
        self._admit = admit
        self.fixed = None if self._exact else fixed
        self._std = self._column([plan.noise_std(i) for i in self._clients])
        self._count_std = self._column([plan.count_std(i) for i in self._clients])
        self._expected = self._column([float(plan.expected[i]) for i in self._clients])
        self.phi = self._column([plan.phi(i) for i in self._clients])
        self._grid = self._grids() if grid else None
        self._slots: Slots | None = None
        self._below = torch.zeros_like(self.phi)
        self._counted = 0
        self._drawn = 0
        self._released = 0
        self._allowed = steps * plan.batches
        self._paid = wait_for_charge  # returns when the charge is on the disk: no noised value is given out before

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Noised mean gradients `[S, P]` on a fresh batch of each client, and their noise variance."""
        if self._drawn >= self._allowed:
            raise RuntimeError(
                f"the ledger was charged for {self._allowed} batches in this round: no further one is drawn"
            )
        self._slots = self._draw()
        self._drawn += 1
        self._released = 0
        return self._release(theta, self._slots)

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """One more release of the batch drawn last, with fresh noise."""
        if self._slots is None or self._released >= self._plan.releases:
            raise RuntimeError(
                f"the ledger was charged for {self._plan.releases} release(s) of a batch: declare more in `releases`"
            )
        return self._release(theta, self._slots)

    @property
    def drawn(self) -> int:
        """Fresh batches drawn so far: equal to what was charged once the round is done."""
        return self._drawn

    @property
    def noise(self) -> list[Noise]:
        """The clients' noise, each from its beginning."""
        return [noise.again() for noise in self._noise]

    @property
    def below(self) -> Tensor:
        """Noised share of units at or below C, mean over all releases so far, `[S, 1]`; for quantile clipping."""
        return self._below / max(1, self._counted)

    def _release(self, theta: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        self._admit(theta)
        self._released += 1
        released, count = self._noised_sum(theta, slots)
        self._paid()
        if self._plan.clipping.counts:
            self._below = (
                self._below + 0.5 + count / self._expected
            )  # by the expected batch: |J| is not public
            self._counted += 1
        return released / self._expected, self.phi

    def _noised_sum(self, theta: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        total, count = self._fitting_sum(theta, slots)
        noisy, counts = bool(self._plan.multipliers.any()), self._plan.clipping.counts
        if self._grid is not None:
            released = noised(total, self._grid, self._noise).float()
            if counts:
                count = noised_counts(count, self._count_std[:, 0].tolist(), self._noise)
            return released, count.float()
        if noisy:  # without noise σ=0 is exact, also for C = inf
            # the sum is nobody else's: one pass over memory
            total = total.addcmul_(self._std.to(total.dtype), self._normal(total).to(total.dtype))
        if counts and noisy:
            noise = self._normal(count).to(count.dtype)
            count = count.addcmul_(self._count_std.to(count.dtype), noise)
        return total.float(), count.float()

    def _normal(self, like: Tensor) -> Tensor:
        """The clients' next numbers, a row for each, in one piece."""
        rows = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        for row, noise in zip(rows, self._noise, strict=True):
            noise.fill(row)
        return rows

    def _grids(self) -> list[Grid]:
        plan, size = self._plan, sum(shape.numel() for shape in self._gradients.space.shapes)
        if not plan.multipliers.all():
            raise ValueError("a grid is for sums with noise")
        return [grid_of(plan.noise_std(i), plan.clip, size) for i in self._clients]

    def _draw(self) -> Slots:
        rows, owners, counts, keys = [], [], [], []
        for s, (client, fresh) in enumerate(zip(self._clients, self._batches, strict=True)):
            positions = next(fresh)
            row, count = self._holdings.slots(client, positions)
            rows.append(row)
            counts.append(count)
            owners.append(np.full(len(positions), s, dtype=np.int64))
            keys.append(self._keys(positions, count))
        owner, count = np.concatenate(owners), np.concatenate(counts)
        if len(count) and count.min() < 1:
            raise ValueError("a protected unit without records has no gradient")
        unit = np.repeat(np.arange(len(owner)), count)
        return Slots(np.concatenate(rows), owner[unit], unit, owner, np.concatenate(keys))

    def _keys(self, positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """A key for each record that depends on its place at its client and on the step, not on the fleet around it.

        Removing a unit renumbers the places behind it. A number of a secret stream is part of every
        key, so the pseudo-random draws made from the keys do not tell places apart.
        """
        if self._dropout is None and self._augment is None:
            return np.zeros(int(counts.sum()), dtype=np.int64)
        unit = np.repeat(positions, counts)
        within = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
        with np.errstate(over="ignore"):
            mixed = (unit.astype(np.uint64) << np.uint64(20)) + within.astype(np.uint64)
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._drawn) * np.uint64(
                0xD1B54A32D192ED03
            )
        return np.asarray(mixed.astype(np.int64))

    def _keyed(self, seeds: Sequence[int] | None, part: Slots) -> Tensor | None:
        """Keys of all views for one purpose, which has a seed for each client; None where there is no such purpose."""
        if seeds is None:
            return None
        return augmentation_keys(
            torch.from_numpy(self._secret(seeds, part)).to(self._device), self._views
        )

    def _secret(self, seeds: Sequence[int] | None, part: Slots) -> np.ndarray:
        if seeds is None:
            return np.zeros_like(part.key)
        return np.asarray(part.key ^ np.array(seeds, dtype=np.int64)[part.client])

    def _fitting_sum(self, theta: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """`_clipped_sum`, with half as many records in a pass for as long as they do not fit."""
        while True:
            try:
                return self._clipped_sum(theta, slots)
            except Exception as error:
                # The limit is halved whatever was drawn: a limit that followed the batch would tell its size.
                if not out_of_memory(error) or (self.fixed is None and self._together == 1):
                    raise
            if self.fixed is not None:
                self.fixed = None  # its buffers take room too: passes of any size from here on
            else:
                self.max_slots //= 2  # outside the handler, where the failed pass is no longer held
            free(self._device)

    @property
    def _together(self) -> int:
        """Records in a pass, so that all their views are no more rows than `max_slots`.

        With exact isolation it is 1, so `Slots.chunks` gives one unit at a time.
        """
        return 1 if self._exact else max(1, self.max_slots // self._views)

    def _clipped_sum(self, theta: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Σ of clipped per-unit gradients for each client `[S, P]`, and the count at or below C `[S, 1]`.

        Not noised, so neither may leave this class.
        """
        rule = self._plan.clipping
        clip = self._plan.clip
        if self._takes_fixed(slots) and self.fixed is not None:
            return self._fixed_sum(self.fixed, theta, slots)
        # In float32 the rounding of a sum would depend on the units that were added before.
        precision = torch.float64 if self._exact else torch.float32
        total = torch.zeros_like(theta, dtype=precision if self._grid is None else torch.int64)
        count = torch.zeros_like(self.phi, dtype=precision)
        steps = None
        if self._grid is not None:
            sizes = [grid.step for grid in self._grid]
            steps = torch.tensor(sizes, dtype=torch.float64, device=self._device)
        for part in slots.chunks(self._together):
            if self._exact:
                grads = self._mean_of_unit(theta, part)
                part = part.single(0)
            client = torch.from_numpy(part.client).to(self._device)
            if not self._exact:
                grads = self._pass(theta, client, part)
            if PRIVATE.isEnabledFor(logging.DEBUG):
                self._tell_lost(part, grads)
            unit = torch.from_numpy(part.unit).to(self._device)
            owner = torch.from_numpy(part.owner).to(self._device)
            means, finite = unit_means(grads, unit, len(part.owner))
            units = Units(owner, finite, theta.shape[0])
            summed, counted = clip_and_sum(means, units, clip, rule, steps)
            total, count = total + summed, count + counted
        return total, count

    def _mean_of_unit(self, theta: Tensor, part: Slots) -> list[Tensor]:
        """Return the mean gradient `[1, n]` of one unit, in float64, from one pass for each record.

        The memory it takes does not grow with the unit, so no unit can make a round fail.
        """
        alone = torch.zeros(1, dtype=torch.int64, device=self._device)
        own = int(part.client[0])
        total = [
            torch.zeros(1, shape.numel(), dtype=torch.float64, device=self._device)
            for shape in self._shapes
        ]
        for i in range(len(part.row)):
            grads = self._pass(theta[own : own + 1], alone, part.single(i))
            for summed, grad in zip(total, grads, strict=True):
                summed += grad
        return [summed / len(part.row) for summed in total]

    @property
    def _shapes(self) -> Sequence[torch.Size]:
        return self._gradients.space.shapes

    def _pass(self, theta: Tensor, client: Tensor, part: Slots) -> list[Tensor]:
        """Return the gradients `[M, n]` of these records, each the mean over its views, from one pass."""
        count, row = self._views, torch.from_numpy(part.row).to(self._device)
        inputs, labels = self._records.take(each_augmentation(row, count))
        keys = self._keyed(self._augment, part)
        if self._view is not None and keys is not None:
            inputs = self._view.view(inputs, keys)
        dropout = self._keyed(self._dropout, part)
        return mean_over_augmentations(
            self._gradients.grads(theta, each_augmentation(client, count), inputs, labels, dropout),
            count,
        )

    def _tell_lost(self, part: Slots, grads: Sequence[Tensor]) -> None:
        lost = np.bincount(
            part.client[~finite_rows(grads).cpu().numpy()], minlength=len(self._clients)
        )
        for client, count in zip(self._clients, lost, strict=True):
            if count:
                PRIVATE.debug(
                    "round %d, batch %d, client %d: the gradient of %d record(s) is not finite and counts as zero",
                    self._round, self._drawn, client, count,
                )  # fmt: skip

    def _takes_fixed(self, slots: Slots) -> bool:
        """Passes of a fixed size are for single records, clipped one by one and summed in float32. They cannot tell of records
        that are no number: whoever asks for that waits for the other way."""
        simple = len(slots.unit) == len(slots.owner)
        return simple and self._grid is None and not PRIVATE.isEnabledFor(logging.DEBUG)

    def _fixed_sum(self, fixed: Sums, theta: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """The same through passes of a fixed size: as many as the records need."""
        keys = {
            "dropout": self._secret(self._dropout, slots),
            "view": self._secret(self._augment, slots),
        }
        return fixed.sums(
            theta, {"row": slots.row, "client": slots.client, **keys}, self._plan.clip
        )

    def _column(self, values: list[float]) -> Tensor:
        # not waited for: a round would begin by letting the device finish all that it has to do
        column = torch.tensor(values, dtype=torch.float64).unsqueeze(1).to(torch.float32)
        return column.to(self._device, non_blocking=True)


def free(device: torch.device) -> None:
    """Gives back what a failed pass had taken: torch would keep it for tensors of the same size."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Attack isolation as a malicious server: search for weights at which one unit changes too much.

Isolation means that deleting one unit (one record, or all records of one person) leaves the
gradients of all other units as they are. The sum of clipped gradients then changes by at most the
clip norm C. A malicious server may choose theta, the vector of trainable numbers, so that rounding
changes the other gradients too.

For each theta, the attack deletes one unit from a data set, repeats the random draws of all other
units (keys and places), and compares the clipped sums before noise is added. With exact isolation,
the sum changes by at most C at every theta. See docs/privacy/isolation.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfed.data.partition import Shards, shards_of
from dpfed.errors import DpfedError
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.privacy.sampling import DrawnBatch
from dpfed.training.job.job import Job

# The attacked data set has at most this many units (a unit is one record, or a person's records).
MAX_UNITS = 48
# Exact isolation lets a unit change a sum by the clip norm C at most. Rounding in float64 may add
# this fraction of C to the change.
SLACK = 1e-6
# Largest absolute element of a tried theta. If elements are far larger, the computation overflows
# and every gradient is set to zero.
LARGEST = 800.0
# Probability that the attack draws the next theta at random. Otherwise it changes the best theta so
# far at random.
FRESH = 0.5


@dataclass(frozen=True)
class ServerAttack:
    """The result of an attack on isolation by a malicious server.

    isolation  the isolation that was attacked, "exact" or "fast"
    places     number of records whose gradients exact isolation computes together; 1 for "fast"
    moved      largest change of the clipped sum by deleting one unit, in units of the clip norm C
    thetas     number of trainable vectors that were tried
    units      number of units in the attacked data set
    """

    isolation: str
    places: int
    moved: float
    thetas: int
    units: int

    @property
    def broken(self) -> bool:
        """True if isolation should be exact, but deleting one unit changed the sum by over C."""
        return self.isolation == "exact" and not self.moved <= 1 + SLACK


class AttackedOracle(FleetOracle):
    """An oracle for attacks, which shows its clipped sums before noise is added.

    An oracle computes and releases noised gradients. Never use this one on a real client, because
    sums without noise are private.
    """

    def batch(self) -> DrawnBatch:
        return self._draw()

    def sum_before_noise(self, theta: Tensor, batch: DrawnBatch) -> Tensor:
        """Return the sum of clipped gradients of a batch, `[P]`, in units of the clip norm C."""
        total, _ = self._clipped_sum(theta.unsqueeze(0), batch)
        scale = 1.0 if self._grid is None else self._grid[0].step
        return total[0].double() * (scale / self._plan.clip)


def attack_server(
    job: Job, seconds: float, oracle: type[AttackedOracle] = AttackedOracle
) -> ServerAttack:
    """Attack as a malicious server: search for weights at which one unit changes the sum most.

    For each theta (trainable vector) it measures by how much deleting one unit changes the sum of
    clipped gradients. It tries random thetas, and random changes of the best theta so far. The
    job's seed decides all of them.

    oracle  class that computes the sums; tests give a faulty one
    """
    if not 0 < seconds < float("inf"):
        raise DpfedError(f"--seconds {seconds:g} is not allowed: give a number above 0")
    target = _Target(job, oracle)
    generator = torch.Generator().manual_seed(job.config.run.seed)
    end = time.monotonic() + seconds
    best = job.theta
    moved = target.movement(best)
    thetas = 1
    while time.monotonic() < end:
        theta = _candidate(job.theta, best, generator)
        found = target.movement(theta)
        thetas += 1
        if found > moved:
            best, moved = theta, found
    isolation = job.config.privacy.isolation
    places = job.model.places if isolation == "exact" else 1
    return ServerAttack(isolation, places, moved, thetas, target.units)


def _candidate(start: Tensor, best: Tensor, generator: torch.Generator) -> Tensor:
    """Return the next theta: a random one, or the best one with some entries changed."""
    noise = torch.randn(len(start), generator=generator).to(start.device)
    fresh, size = torch.rand(2, generator=generator).tolist()
    if fresh < FRESH:
        spread = float(10 ** (3 * size - 1))
        return (start + spread * noise).clamp(-LARGEST, LARGEST)
    share = torch.rand(len(start), generator=generator).to(start.device)
    step = float(best.std()) if len(best) > 1 else 1.0
    changed = torch.where(share < 10 ** (-2 * size), best + step * noise, best)
    return changed.clamp(-LARGEST, LARGEST)


class _Target:
    """The target of the attack: a data set, and a copy of it without the first unit.

    All other units have the same random draws in both data sets.
    """

    def __init__(self, job: Job, oracle: type[AttackedOracle]) -> None:
        units = min(int(job.private.shards.sizes[0]), MAX_UNITS)
        if job.served or units < 2:
            raise DpfedError(
                "dpfed audit --server needs records of a client: "
                "use a configuration whose first client has two of them or more"
            )
        rows, sizes = job.private.shards.slots(0, np.arange(units))
        inputs, labels = job.private.records.take(torch.from_numpy(rows).to(job.device))
        self.units = units
        self._job = job
        self._make = oracle
        self._records = Records(inputs, labels)
        self._unit = np.repeat(np.arange(units), sizes)
        gone = int(sizes[0])
        kept = torch.arange(gone, len(rows), device=job.device)
        self._whole = self._oracle(self._records, self._unit)
        self._less = self._oracle(Records(*self._records.take(kept)), self._unit[gone:])
        self._gone = gone

    def _oracle(self, records: Records, unit: np.ndarray) -> AttackedOracle:
        job = self._job
        shards: Shards = shards_of(np.zeros(len(unit), dtype=np.int64), 1, unit)
        sizes = shards.sizes
        plan = Plan(
            sampling="poisson",
            clip=job.plan.clip,
            sizes=sizes,
            rates=np.ones(1),
            expected=sizes.astype(float),
            multipliers=job.plan.multipliers[:1],
            clipping=job.plan.clipping,
        )
        privacy = job.config.privacy
        terms = RoundTerms(
            plan, job.streams, 1, [0], 1, grid=privacy.grid is True, isolation=privacy.isolation
        )
        data = PrivateData(job.model, records, shards, job.private.augmentations)
        limits = PassLimits(job.config.run.max_slots, places=job.model.places)
        return self._make(data, terms, limits)

    def movement(self, theta: Tensor) -> float:
        """Return by how much deleting the first unit changes the clipped sum, in units of C."""
        whole = self._whole.batch()
        # Keep the keys (seeds of dropout) and the places of all other units. With new ones, the sum
        # would change for reasons other than the deleted unit.
        less = replace(
            whole,
            row=whole.row[self._gone :] - self._gone,
            client=whole.client[self._gone :],
            unit=whole.unit[self._gone :] - 1,
            owner=whole.owner[1:],
            key=whole.key[self._gone :],
            place=whole.place[1:],
        )
        before = self._whole.sum_before_noise(theta, whole)
        after = self._less.sum_before_noise(theta, less)
        return float((before - after).norm())

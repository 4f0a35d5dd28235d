"""How many clients fit on a GPU side by side: `fleet_size = "auto"` tries one pass before round 1.

The pass has the shape of the run's own, on blank records, so nothing private is read. A cohort that does not fit is halved
until it does. On a CPU the whole cohort is one fleet.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape, slots_for
from dpfed.privacy.record_batch import Records
from dpfed.training.job.job import Job
from dpfed.training.job.message_size import local_bytes

COPIES = 3  # of the clients' states: before a step, after it, and what lies between


def fleet_size(job: Job) -> int:
    """The configured number of clients side by side, or the most that fit."""
    given, cohort = job.config.run.fleet_size, job.schedule.cohort
    if job.batched_sum is not None:
        return (
            cohort  # how many runs fit beside one another is found by the union (engine/packed.py)
        )
    if given != "auto":
        return given
    if job.device.type != "cuda":
        return cohort
    found = most_that_fit(cohort, lambda clients: fits(job, clients))
    torch.cuda.empty_cache()
    return found


def most_that_fit(cohort: int, fit: Callable[[int], bool]) -> int:
    """The cohort, or its half, quarter, ...; one client is tried by the run itself."""
    size = cohort
    while size > 1 and not fit(size):
        size = -(-size // 2)
    return size


def slots_of(job: Job, clients: int) -> int:
    """Slots of a pass for so many clients, the largest there are."""
    slots = job.config.run.slots
    if slots != "auto":
        return slots
    return slots_for(float(np.sort(job.plan.expected)[-clients:].mean()) * clients)


def fits(job: Job, clients: int, slots: int | None = None) -> bool:
    """Whether a pass of so many clients and their states find room on the GPU."""
    device, slots = job.device, slots or slots_of(job, clients)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    try:
        blank_pass(job, clients, slots)
    except torch.OutOfMemoryError:
        return False
    taken = torch.cuda.max_memory_allocated(device) - before
    passes = 1 if job.config.run.graphs is False else 2  # a captured pass keeps memory of its own
    return passes * taken + COPIES * clients * local_bytes(job.algorithm, job.space) <= free


def blank_pass(job: Job, clients: int, slots: int) -> None:
    """One clipped sum over records of zeros."""
    device, records = job.device, job.records
    blank = Records(
        {
            name: torch.zeros_like(x[:1]).expand(slots, *x.shape[1:])
            for name, x in records.inputs.items()
        },
        torch.zeros(slots, dtype=records.labels.dtype, device=device),
    )
    rule = job.plan.clipping
    shape = PassShape(clients, slots, job.space.size)
    pass_ = FixedSum(job.model, blank, rule, job.view, shape, capture=False)
    rows, zeros = (
        torch.arange(slots, device=device),
        torch.zeros(slots, dtype=torch.int64, device=device),
    )
    filling = Pass.of(rows, rows * clients // slots, torch.ones_like(rows), zeros, zeros)
    pass_(job.theta.expand(clients, -1), filling, job.plan.clip)

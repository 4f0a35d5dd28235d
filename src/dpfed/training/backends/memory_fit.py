"""Find how many clients fit on a GPU side by side (`run.fleet_size = "auto"`).

Before round 1 one pass of the run's shape is computed on blank records, so nothing private is read.
A cohort that does not fit is halved until it does. On a CPU the whole cohort is one fleet.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape, slots_for
from dpfed.privacy.record_batch import Records
from dpfed.training.job.job import Job
from dpfed.training.job.message_size import local_bytes

# Copies of the clients' states: before a step, after it, and the temporary one.
COPIES = 3


def fleet_size(job: Job) -> int:
    """Return the configured number of clients side by side, or the largest that fits."""
    configured = job.config.run.fleet_size
    cohort = job.schedule.cohort
    if job.batched_sum is not None:
        # The pack of runs finds out how many of them fit (batched_runs.py).
        return cohort
    if configured != "auto":
        return configured
    if job.device.type != "cuda":
        return cohort
    found = most_that_fit(cohort, lambda clients: fits(job, clients))
    torch.cuda.empty_cache()
    return found


def most_that_fit(cohort: int, fit: Callable[[int], bool]) -> int:
    """Return the cohort, or its half, quarter, ...; one client is not tried here."""
    size = cohort
    while size > 1 and not fit(size):
        size = -(-size // 2)
    return size


def slots_of(job: Job, clients: int) -> int:
    """Return the slots of a pass for this many clients, those with the largest batches."""
    slots = job.config.run.slots
    if slots != "auto":
        return slots
    return slots_for(float(np.sort(job.plan.expected)[-clients:].mean()) * clients)


def fits(job: Job, clients: int, slots: int | None = None) -> bool:
    """Return True if the GPU has room for a pass of this many clients and for their states."""
    device = job.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0]
    try:
        blank_pass(job, clients, slots or slots_of(job, clients))
    except torch.OutOfMemoryError:
        return False
    peak = torch.cuda.max_memory_allocated(device) - before
    # A captured pass has memory of its own.
    passes = 1 if job.config.run.graphs is False else 2
    return passes * peak + COPIES * clients * local_bytes(job.algorithm, job.space) <= free


def blank_pass(job: Job, clients: int, slots: int) -> None:
    """Compute one clipped sum over records of zeros."""
    device = job.device
    records = job.records
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
    rows = torch.arange(slots, device=device)
    zeros = torch.zeros(slots, dtype=torch.int64, device=device)
    filling = Pass.of(rows, rows * clients // slots, torch.ones_like(rows), zeros, zeros)
    pass_(job.theta.expand(clients, -1), filling, job.plan.clip)

"""Find how many clients fit into GPU memory side by side (`run.fleet_size = "auto"`).

Before round 1, a trial pass (one forward and backward computation) uses records of zeros, so no
private record is read. While the trial does not fit into memory, the number of clients is halved.
On a CPU all clients of a round are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape, slots_for
from dpfed.privacy.record_batch import Records
from dpfed.training.job.job import Job
from dpfed.training.messages.message_size import local_bytes

# GPU memory holds this many copies of each client's state: before a step, after it, and a temporary
# one.
COPIES = 3


def fleet_size(job: Job) -> int:
    """Return the number of clients to compute side by side: as configured, or as many as fit."""
    configured = job.config.run.fleet_size
    cohort = job.schedule.cohort
    if job.batched_sum is not None:
        # For runs that train together, `Pack._union` of batched_runs.py finds out how many clients
        # fit into memory.
        return cohort
    if configured != "auto":
        return configured
    if job.device.type != "cuda":
        return cohort
    found = most_that_fit(cohort, lambda clients: fits(job, clients))
    torch.cuda.empty_cache()
    return found


def most_that_fit(cohort: int, fit: Callable[[int], bool]) -> int:
    """Return the first of cohort, cohort/2, cohort/4, ... for which `fit` returns True.

    Return 1 if none of the numbers above 1 fits; `fit(1)` is not called.
    """
    size = cohort
    while size > 1 and not fit(size):
        size = -(-size // 2)
    return size


def slots_of(job: Job, clients: int) -> int:
    """Return how many records are computed at once, for `clients` clients.

    The number is that of slots, the fixed places for records. With `run.slots = "auto"`, the number
    is computed from the sum of the `clients` largest expected batch sizes.
    """
    slots = job.config.run.slots
    if slots != "auto":
        return slots
    return slots_for(float(np.sort(job.plan.expected)[-clients:].mean()) * clients)


def fits(job: Job, clients: int, slots: int | None = None) -> bool:
    """Return True if the GPU has memory to compute `clients` clients at once, with their states.

    slots  number of records that are computed at once; None for the number from `slots_of`
    """
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
    # To capture a computation as a CUDA graph, the GPU needs as much memory as for a second
    # computation.
    passes = 1 if job.config.run.graphs is False else 2
    return passes * peak + COPIES * clients * local_bytes(job.algorithm, job.space) <= free


def blank_pass(job: Job, clients: int, slots: int) -> None:
    """Compute forward and backward over records of zeros, to test if this fits into memory.

    clients  number of clients that are computed at once
    slots    number of records that are computed at once
    """
    device = job.device
    records = job.private.records
    blank = Records(
        {
            name: torch.zeros_like(x[:1]).expand(slots, *x.shape[1:])
            for name, x in records.inputs.items()
        },
        torch.zeros(slots, *records.labels.shape[1:], dtype=records.labels.dtype, device=device),
    )
    rule = job.plan.clipping
    shape = PassShape(clients, slots, job.space.size)
    pass_ = FixedSum(job.model, blank, rule, job.private.augmentations, shape, capture=False)
    rows = torch.arange(slots, device=device)
    zeros = torch.zeros(slots, dtype=torch.int64, device=device)
    filling = Pass.of(rows, rows * clients // slots, torch.ones_like(rows), zeros, zeros)
    pass_(job.theta.expand(clients, -1), filling, job.plan.clip)

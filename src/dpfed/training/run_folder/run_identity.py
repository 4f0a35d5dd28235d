"""Everything that decides the numbers of a run; a checkpoint and all processes must agree on it."""

from __future__ import annotations

from typing import Any

from dpfed.training.job.job import Job
from dpfed.training.run_folder.resume import fixed_settings


def run_identity(job: Job) -> dict[str, Any]:
    """Return the settings, sizes and kind of device that the numbers of a run follow from.

    The kind of device is part of it because each kind draws seeded noise differently.
    """
    identity = {
        **fixed_settings(job.config),
        "sizes": job.plan.sizes.tolist(),
        "device": job.device.type,
    }
    if job.served:
        identity["served"] = True
    return identity

"""The identity of a run: the settings that determine its results.

All processes of a run must have equal settings. A run resumes only from a checkpoint with equal
settings.
"""

from __future__ import annotations

from typing import Any

from dpfed.training.job.job import Job
from dpfed.training.run_folder.resume import fixed_settings


def run_identity(job: Job) -> dict[str, Any]:
    """Return the settings, client sizes and device type that determine the numbers of a run.

    The device type is included, because CPU and GPU draw different numbers from the same seed.
    """
    identity = {
        **fixed_settings(job.config),
        "sizes": job.plan.sizes.tolist(),
        "device": job.device.type,
    }
    if job.served:
        identity["served"] = True
    return identity

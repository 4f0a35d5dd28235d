"""The privacy ledger of a run: its recorded noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.plan import Plan
from dpfed.training.job.job import Job

CALIBRATION_TOLERANCE = 1e-4


def with_recorded_noise(job: Job, path: Path) -> Job:
    """Return the job with the noise multipliers that the ledger of a calibrated run records.

    Another version may calibrate slightly different multipliers for the same target. A run resumes
    with those it began with, so that oracle, ledger and statement agree bit for bit.
    """
    if job.config.privacy.target_epsilon is None or not path.exists():
        return job
    with Ledger.open(path, readonly=True) as ledger:
        multipliers = recorded_multipliers(job.plan, ledger)
    return replace(job, plan=replace(job.plan, multipliers=multipliers))


def recorded_multipliers(plan: Plan, ledger: Ledger) -> np.ndarray:
    """Return one noise multiplier per client: the recorded one if it agrees to 1e-4, else the plan's.

    Clients of equal rate have equal noise, so a record is found by its rate. A statement of very
    many rates is rounded to a grid; then the charged rows tell the noise.
    """
    try:
        noise_of_rate = {float(rate): float(noise) for rate, noise in ledger.meta["kinds"]}
    except (KeyError, TypeError, ValueError):
        raise DpfedError(
            f"the ledger {ledger.path} does not state its plan: it was not written by a run"
        ) from None
    for history in ledger.histories().values():
        noise_of_rate |= {kind.rate: kind.noise_multiplier for kind, _ in history}
    multipliers = plan.multipliers.copy()
    for computed in np.unique(plan.multipliers):
        same_noise = plan.multipliers == computed
        rates = [rate for rate in plan.rates[same_noise].tolist() if rate in noise_of_rate]
        recorded = {noise_of_rate[rate] for rate in rates}
        agreeing = [
            noise
            for noise in recorded
            if math.isclose(noise, computed, rel_tol=CALIBRATION_TOLERANCE)
        ]
        if len(agreeing) == 1:
            multipliers[same_noise] = agreeing[0]
    return multipliers

"""What a server's run has cost at most. It has no ledger, as every client keeps its own and pays for a round once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.plan import Plan
from dpfed.registry import registry
from dpfed.training.budget.prior_spending import served_prior_spending
from dpfed.training.budget.recorded_spending import RecordedSpending
from dpfed.training.budget.run_ledger import CALIBRATION_TOLERANCE
from dpfed.training.budget.spending import budget_of
from dpfed.training.job.plan import declared_sizes, plan_for
from dpfed.training.run_folder.files import CONFIG

BY_CHOICE = "the clients of a federation stay away as they like, so it equals the server's figure"


def with_least_noise(plan: Plan, recorded: float | list[float] | None) -> Plan:
    """Return the plan with no more noise than a server's result records as its sigma.

    Another version may have calibrated a slightly smaller sigma for the same target.
    """
    if recorded is None:
        return plan
    computed = np.array([plan.multipliers.min(), plan.multipliers.max()])
    ratio = float((np.broadcast_to(recorded, 2) / computed).min())
    if not 1 - CALIBRATION_TOLERANCE <= ratio < 1:
        return plan
    return replace(plan, multipliers=ratio * plan.multipliers)


def served_spending(
    folder: Path, seeded: bool, colluding: int = 0, sigma: float | list[float] | None = None
) -> RecordedSpending:
    """Upper bounds, from the configuration that the server has kept: as if every client had taken part in every round."""
    config = load(folder / CONFIG, [], registry())
    past = served_prior_spending(config)
    plan, schedule = plan_for(config, declared_sizes(config))
    if not plan.private:
        raise DpfedError(
            f"the configuration in {folder} is none that a server has run by: put back its {CONFIG}"
        )
    if config.privacy.target_epsilon is not None:
        plan = with_least_noise(plan, sigma)
    planned = budget_of(
        plan, schedule, config.privacy.delta, config.privacy.budget, colluding, past
    ).planned
    steps = schedule.rounds * schedule.local_steps
    kinds, which = plan.kinds()
    costs = [epsilon([*past.prior, (kind, steps)], config.privacy.delta).value for kind in kinds]
    return RecordedSpending(
        planned,
        schedule.clients,
        np.array(costs)[which],
        0,
        seeded,
        BY_CHOICE,
        schedule.rounds,
        served=True,
    )

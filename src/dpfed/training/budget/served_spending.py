"""What a server's run has cost at most. It has no ledger, as every client keeps its own and pays for a round once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import epsilon
from dpfed.registry import registry
from dpfed.training.budget.prior_spending import served_prior_spending
from dpfed.training.budget.recorded_spending import RecordedSpending
from dpfed.training.budget.spending import budget_of
from dpfed.training.job.plan import declared_sizes, plan_for
from dpfed.training.run_folder.files import CONFIG

BY_CHOICE = "the clients of a federation stay away as they like, so it equals the server's figure"


def served_spending(folder: Path, seeded: bool, colluding: int = 0) -> RecordedSpending:
    """Upper bounds, from the configuration that the server has kept: as if every client had taken part in every round."""
    config = load(folder / CONFIG, [], registry())
    past = served_prior_spending(config)
    plan, schedule = plan_for(config, declared_sizes(config))
    if not plan.private:
        raise DpfedError(
            f"the configuration in {folder} is none that a server has run by: put back its {CONFIG}"
        )
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

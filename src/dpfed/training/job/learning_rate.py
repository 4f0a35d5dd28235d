"""Replace `algorithm.lr = "auto"` by a number, from the plan and the model of a job."""

from __future__ import annotations

import math
from dataclasses import replace

from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.config import Config
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.planning.recipe import RecipeFacts, automatic_lr


def with_number(config: Config, plan: Plan, schedule: Schedule) -> Config:
    """Return the configuration with a number for `algorithm.lr`; no record is read."""
    algorithm = config.algorithm
    if algorithm.lr != "auto" or not isinstance(algorithm, DPFedAdamW):
        return config
    facts = RecipeFacts(
        steps=schedule.rounds * schedule.local_steps,
        cohort=schedule.cohort,
        gamma=algorithm.gamma,
        floor=algorithm.bc_floor if algorithm.bc and algorithm.bc_floor else 1.0,
        # The mean of cos^2 and cos over a half period give sqrt(3/8).
        schedule=1.0 if config.run.lr_schedule == "constant" else math.sqrt(3 / 8),
        head=head_alone(config),
        private=plan.private,
    )
    return replace(config, algorithm=replace(algorithm, lr=automatic_lr(facts)))


def head_alone(config: Config) -> bool:
    """Return True if only a linear head is trained."""
    return config.model.train == "head" or config.model.name == "linear"

"""Choose a learning rate for `algorithm.lr = "auto"`, from the plan and the model of a job."""

from __future__ import annotations

import math
from dataclasses import replace

from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.config import Config
from dpfed.model.parameter_vector import Space
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.planning.recipe import Part, RecipeFacts, automatic_lr


def with_number(config: Config, plan: Plan, schedule: Schedule, space: Space) -> Config:
    """Return the configuration with "auto" in `algorithm.lr` replaced by a number.

    The number depends on no training record. A configured number is returned unchanged.
    """
    algorithm = config.algorithm
    if algorithm.lr != "auto" or not isinstance(algorithm, DPFedAdamW):
        return config
    facts = RecipeFacts(
        rounds=schedule.rounds,
        local_steps=schedule.local_steps,
        cohort=schedule.cohort,
        gamma=algorithm.gamma,
        average=config.run.average,
        floor=algorithm.bc_floor if algorithm.bc and algorithm.bc_floor else 1.0,
        # A cosine schedule multiplies the learning rate by (1 + cos x)/2, where x goes from 0 to π
        # over the rounds. The root mean square of this factor is sqrt(3/8).
        schedule=1.0 if config.run.lr_schedule == "constant" else math.sqrt(3 / 8),
        part=part_of(config),
        fan_in=mean_fan_in(space),
        private=plan.private,
    )
    return replace(config, algorithm=replace(algorithm, lr=automatic_lr(facts)))


def part_of(config: Config) -> Part:
    """Return the trained part of the model: "head", "adapter" or "layers"."""
    if head_alone(config):
        return "head"
    return "adapter" if config.model.train == "lora" else "layers"


def mean_fan_in(space: Space) -> float:
    """Return the mean number of inputs of the trained matrices, weighted by their sizes.

    Return 1 if no matrix is trained.
    """
    matrices = [shape for shape in space.shapes if len(shape) > 1]
    total = sum(shape.numel() for shape in matrices)
    return sum(shape.numel() ** 2 / shape[0] for shape in matrices) / total if total else 1.0


def head_alone(config: Config) -> bool:
    """Return True if only a linear head is trained."""
    return config.model.train == "head" or config.model.name == "linear"

"""The recipe: its learning rate follows from public numbers, and its keys make a configuration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dpfed.config import build, overlay
from dpfed.privacy.planning.recipe import (
    PLAIN_BODY,
    PLAIN_HEAD,
    SPREAD_ADAPTER,
    SPREAD_HEAD,
    SPREAD_LAYER,
    RecipeFacts,
    automatic_lr,
    recipe,
)
from dpfed.registry import registry

FACTS = RecipeFacts(
    steps=2000,
    cohort=5,
    gamma=0.9,
    floor=0.5,
    schedule=1.0,
    part="head",
    fan_in=400.0,
    private=True,
)


def spread(facts: RecipeFacts) -> float:
    """How far noise alone moves a weight, as the module's first lines state it."""
    repeats = 1 / (1 - facts.gamma)
    step = automatic_lr(facts) * facts.schedule / math.sqrt(facts.floor)
    return step * repeats * math.sqrt(facts.steps / facts.cohort)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"steps": 90, "cohort": 10},
        {"gamma": 0.0},
        {"gamma": 0.5, "floor": 1.0},
        {"schedule": math.sqrt(3 / 8)},
    ],
)
def test_noise_alone_moves_a_weight_equally_far_in_every_plan(change: dict[str, float]) -> None:
    facts = replace(FACTS, **change)  # type: ignore[arg-type]
    assert spread(facts) == pytest.approx(SPREAD_HEAD, rel=5e-3)
    assert spread(replace(facts, part="adapter")) == pytest.approx(SPREAD_ADAPTER, rel=5e-3)
    layers = replace(facts, part="layers")
    assert spread(layers) == pytest.approx(SPREAD_LAYER / 20, rel=5e-3)


def test_the_papers_setting_has_this_rate() -> None:
    assert automatic_lr(FACTS) == 0.00106


def test_a_run_without_noise_has_the_usual_rates_of_adam() -> None:
    plain = replace(FACTS, private=False)
    assert automatic_lr(plain) == pytest.approx(PLAIN_HEAD / 10)
    assert automatic_lr(replace(plain, part="adapter", gamma=0.0)) == PLAIN_BODY


def test_runs_of_a_few_steps_move_less() -> None:
    few = automatic_lr(replace(FACTS, steps=4))
    assert few == automatic_lr(replace(FACTS, steps=45)) > automatic_lr(replace(FACTS, steps=46))
    assert spread(replace(FACTS, steps=4)) < SPREAD_HEAD / 2


def test_without_damping_the_rate_is_above_zero() -> None:
    undamped = automatic_lr(replace(FACTS, gamma=1.0))
    assert undamped == pytest.approx(automatic_lr(FACTS) / 10, rel=5e-3)


@pytest.mark.parametrize("calibrated", [True, False])
def test_the_recipes_keys_are_a_configuration(calibrated: bool) -> None:
    privacy = {"target_epsilon": 8.0} if calibrated else {"sigma": 1.0, "batch": 16}
    config = build(overlay(recipe(calibrated), {"privacy": privacy}), registry())
    assert config.algorithm.lr == "auto"
    assert config.privacy.clip_mode == "automatic"
    assert config.privacy.batch == ("auto" if calibrated else 16)
    assert (config.run.cohort_choice, config.run.lr_schedule) == ("balanced", "constant")

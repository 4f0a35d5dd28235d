"""The recipe: its learning rate follows from public numbers, and its keys make a configuration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dpfed.config import build, load, overlay
from dpfed.privacy.planning.recipe import (
    PLAIN_BODY,
    PLAIN_HEAD,
    SHORT_ROUNDS,
    SPREAD_ADAPTER,
    SPREAD_HEAD,
    SPREAD_LAYER,
    RecipeFacts,
    automatic_lr,
    reach,
    recipe,
)
from dpfed.registry import registry

FACTS = RecipeFacts(
    rounds=100,
    local_steps=20,
    cohort=5,
    gamma=0.9,
    average=0.95,
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
    return step * repeats * math.sqrt(facts.rounds * facts.local_steps / facts.cohort)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rounds": 30, "local_steps": 3, "cohort": 10},
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
    few = replace(FACTS, rounds=20, local_steps=2)
    assert automatic_lr(few) == automatic_lr(replace(few, rounds=22))
    assert automatic_lr(few) > automatic_lr(replace(few, rounds=23))
    assert spread(replace(few, local_steps=1)) < SPREAD_HEAD * 0.7


def result_of(moves: torch.Tensor, gamma: float, average: float) -> torch.Tensor:
    """Run the recursion of the alignment and of the average over rounds, as a server does."""
    weight = change = total = torch.zeros_like(moves[0])
    shares = 0.0
    for move in moves:
        change = move + gamma * change
        weight = weight + change
        total = average * total + (1 - average) * weight
        shares = average * shares + (1 - average)
    return total / shares


@pytest.mark.parametrize(("gamma", "average"), [(0.9, 0.95), (0.9, 0.0), (0.0, 0.5), (1.0, 0.9)])
def test_the_reach_is_that_of_the_recursion(gamma: float, average: float) -> None:
    for rounds in (1, 2, 7):
        ends = result_of(torch.eye(rounds, dtype=torch.float64), gamma, average)
        assert reach(rounds, gamma, average) == pytest.approx(float(ends.norm()))


def test_a_move_is_repeated_until_the_end() -> None:
    assert reach(2, 0.5, 0.0) == pytest.approx(math.sqrt(1.5**2 + 1))
    assert reach(2, 0.0, 1.0) == pytest.approx(math.sqrt(1 + 0.5**2))
    assert reach(400, 0.9, 0.0) == pytest.approx(10 * math.sqrt(400), rel=0.05)


@pytest.mark.parametrize("rounds", [1, 6, 19, SHORT_ROUNDS])
def test_noise_moves_the_result_of_a_short_run_as_far_as_that_of_a_longer_one(rounds: int) -> None:
    longer = replace(FACTS, rounds=SHORT_ROUNDS)
    moved = automatic_lr(replace(longer, rounds=rounds)) * reach(rounds, 0.9, 0.95)
    assert moved == pytest.approx(automatic_lr(longer) * reach(SHORT_ROUNDS, 0.9, 0.95), rel=5e-3)


def test_longer_runs_keep_their_rates() -> None:
    assert automatic_lr(replace(FACTS, rounds=20)) == pytest.approx(
        0.3 / 10 * 0.5**0.5 / 80**0.5, rel=5e-3
    )


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


def test_the_preset_of_language_models_is_the_recipe() -> None:
    config = load("llm", [], registry())
    for section, table in recipe(language=True).items():
        for key, value in table.items():
            assert getattr(getattr(config, section), key) == value, key
    assert "beta1" not in recipe()["algorithm"]

"""The budget that a client has left: by hand for pure Gaussians, and by the rule of requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import norm

from dpfed.federation.client.budget_left import (
    MOST_ROUNDS,
    TOLERANCE,
    budget_left,
    costliest_round,
    largest,
    rounds_left,
)
from dpfed.federation.client_config import ClientConfig, build
from dpfed.federation.policy import check_spending
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry
from dpfed.training.budget.ledgers import client_ledger

# One step at rate 1 and sigma 10 in a round: n rounds are a Gaussian of mu = sqrt(n) / 10.
GAUSSIAN = {
    "records": 50,
    "max_epsilon": 1.0,
    "max_rate": 1.0,
    "min_sigma": 10.0,
    "max_local_steps": 1,
    "algorithms": ["dp-fedavg"],
}


def config_of(state: Path, **policy: Any) -> ClientConfig:
    raw = {
        "client": {"name": "clinic", "state": str(state), "servers": ["hub"]},
        "policy": {**GAUSSIAN, **policy},
        "data": {"name": "digits"},
        "model": {"name": "linear"},
    }
    return build(raw, registry())


def gaussian_delta(mu: float, epsilon: float) -> float:
    below = norm.cdf(mu / 2 - epsilon / mu)
    return float(below - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def affordable(epsilon: float) -> int:
    """Return the exact number of Gaussian rounds that epsilon allows at delta 1e-5."""
    n = 1
    while gaussian_delta(math.sqrt(n + 1) / 10, epsilon) <= 1e-5:
        n += 1
    return n


def charged(state: Path, rounds: int, void: bool = False) -> None:
    state.mkdir(exist_ok=True)
    kind = Mechanism("poisson", 1.0, 10.0)
    noise = "seeded" if void else "os"
    with client_ledger(state, "clinic", 1e-5, "record", False) as ledger:
        for t in range(1, rounds + 1):
            ledger.charge([Charge("clinic", t, 1, kind, noise, void)], run="first")  # type: ignore[arg-type]


def test_a_new_client_can_afford_its_whole_budget(tmp_path: Path) -> None:
    left = budget_left(config_of(tmp_path / "state"))
    exact = affordable(1.0)
    assert (1 - TOLERANCE) * exact - 1 <= left.rounds_least <= exact
    assert (left.spent, left.rounds_alike) == (0.0, None)
    assert "epsilon 0.000 of policy.max_epsilon = 1 at delta 1e-05, over all runs" in str(left)
    assert not (tmp_path / "state").exists(), "looking changed the state folder"


def test_charges_of_earlier_runs_are_taken_off(tmp_path: Path) -> None:
    charged(tmp_path / "state", 4)
    left = budget_left(config_of(tmp_path / "state"))
    assert gaussian_delta(0.2, left.spent) <= 1e-5
    assert gaussian_delta(0.2, left.spent * 0.99) > 1e-5
    exact = affordable(1.0) - 4
    for found in (left.rounds_least, left.rounds_alike):
        assert found is not None
        assert (1 - TOLERANCE) * exact - 1 <= found <= exact
    assert "like the last one" in str(left)
    assert "(max_rate = 1, min_sigma = 10, max_local_steps = 1)" in str(left)


def test_test_mode_spends_nothing(tmp_path: Path) -> None:
    charged(tmp_path / "state", 4, void=True)
    left = budget_left(config_of(tmp_path / "state"))
    assert (left.spent, left.rounds_alike) == (0.0, None)


def test_a_spent_budget_leaves_no_round(tmp_path: Path) -> None:
    charged(tmp_path / "state", 4)
    left = budget_left(config_of(tmp_path / "state", max_epsilon=0.5))
    assert (left.rounds_least, left.rounds_alike) == (0, 0)
    assert "at least 0 rounds" in str(left)


def test_the_count_follows_the_rule_of_requests(tmp_path: Path) -> None:
    policy = config_of(tmp_path, max_epsilon=2.0).policy
    kind = Mechanism("poisson", 0.05, 1.0)
    rounds = rounds_left(policy, kind, 10, [])
    assert rounds > 1
    assert check_spending(policy, kind, 10 * rounds, []) is None
    more = math.ceil(rounds * (1 + TOLERANCE)) + 1
    assert check_spending(policy, kind, 10 * more, []) is not None


def test_algorithms_with_more_releases_cost_more(tmp_path: Path) -> None:
    plain, _ = costliest_round(config_of(tmp_path).policy)
    all_of_them, steps = costliest_round(config_of(tmp_path, algorithms=[]).policy)
    assert (plain.batches, plain.releases, steps) == (1, 1, 1)
    assert max(all_of_them.batches, all_of_them.releases) > 1


def test_a_server_may_ask_for_the_costliest_switches(tmp_path: Path) -> None:
    """By default dp-fafed has one release of a batch, and with fafed_vr two."""
    worst, _ = costliest_round(config_of(tmp_path, algorithms=["dp-fafed"]).policy)
    assert (worst.batches, worst.releases) == (1, 2)
    worst, _ = costliest_round(config_of(tmp_path, algorithms=["dp-fedsam"]).policy)
    assert (worst.batches, worst.releases) == (2, 2)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 100, 999, MOST_ROUNDS, 10**6])
def test_the_largest_number_is_found_within_the_tolerance(limit: int) -> None:
    found = largest(lambda n: n <= limit)
    exact = min(limit, MOST_ROUNDS)
    assert exact * (1 - TOLERANCE) - 1e-9 <= found <= exact

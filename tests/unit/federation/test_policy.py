"""The rules of a client: requests that it refuses before anything is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dpfed.federation.client_config import Policy, build
from dpfed.federation.messages import ClippingTerms, Terms
from dpfed.federation.policy import check_model, check_sender, check_training
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry

TERMS = Terms(
    run="run-1", server="hub", client="clinic-0", index=0, seed=7, seeded=False, round=2,
    rounds=3, local_steps=5, clients=3, cohort=3, lr=0.01,
    algorithm={"name": "dp-fedavg", "lr": 0.1}, model="ab", rate=0.05, expected=5.0, sigma=1.0,
    clip=0.5, clipping=ClippingTerms("flat", 0.01, 0.5, 0.2, 10.0), grid=True, equal_phi=True,
    rows=0, head="", used=0, max_rounds=0, upload="float32", download="float32",
)  # fmt: skip
STEP = Mechanism("poisson", 0.05, 1.0)
RAW: dict[str, dict[str, Any]] = {
    "client": {"name": "clinic-0", "state": "state", "servers": ["hub"]},
    "policy": {"records": 100, "max_epsilon": 5.0},
    "data": {"name": "digits"},
    "model": {"name": "linear"},
}


def policy(**keys: Any) -> Policy:
    return Policy(**({"records": 100, "max_epsilon": 5.0} | keys))


def terms(**keys: Any) -> Terms:
    return dataclasses.replace(TERMS, **keys)


def test_a_request_within_the_policy_is_not_refused() -> None:
    assert check_training(TERMS, policy(), STEP, []) is None
    assert (
        check_training(
            TERMS, policy(algorithms=("dp-fedavg",), max_local_steps=5, max_rate=0.05), STEP, []
        )
        is None
    )
    assert check_training(terms(grid=False), policy(require_grid=False), STEP, []) is None


@pytest.mark.parametrize(
    ("changed", "keys", "what"),
    [
        ({"sigma": 0.99}, {"min_sigma": 1.0}, "sigma 0.99 is below policy.min_sigma"),
        ({"clip": 0.51}, {"max_clip": 0.5}, "policy.max_clip"),
        ({"rate": 0.06, "expected": 6.0}, {"max_rate": 0.05}, "policy.max_rate"),
        ({"local_steps": 6}, {"max_local_steps": 5}, "policy.max_local_steps"),
        ({"grid": False}, {}, "policy.require_grid"),
        ({}, {"algorithms": ("dp-scaffold",)}, "policy.algorithms"),
        ({"expected": 5.1}, {}, "policy.records = 100"),
        ({"expected": 4.9}, {}, "policy.records = 100"),
    ],
)
def test_a_request_outside_the_policy_is_refused(
    changed: dict[str, Any], keys: dict[str, Any], what: str
) -> None:
    assert what in str(check_training(terms(**changed), policy(**keys), STEP, []))


def test_epsilon_counts_the_whole_history_and_this_round() -> None:
    after_three = epsilon([(STEP, 15)], 1e-5)
    for margin, refused in ((1.001, False), (0.999, True)):
        reason = check_training(TERMS, policy(max_epsilon=after_three * margin), STEP, [(STEP, 10)])
        assert (reason is not None) is refused
    assert "policy.max_epsilon" in str(
        check_training(TERMS, policy(max_epsilon=after_three * 0.999), STEP, [(STEP, 10)])
    )
    # Spent in another run.
    other = [(Mechanism("poisson", 0.05, 0.5), 40)]
    assert check_training(TERMS, policy(max_epsilon=after_three * 1.001), STEP, other) is not None


def test_the_sender_and_the_model() -> None:
    config = build(RAW, registry())
    assert check_sender(TERMS, config) is None
    assert "clinic-9" in str(check_sender(terms(client="clinic-9"), config))
    assert "client.servers" in str(check_sender(terms(server="evil"), config))
    assert "allow_seeded" in str(check_sender(terms(seeded=True), config))
    seeded = build({**RAW, "client": {**RAW["client"], "allow_seeded": True}}, registry())
    assert check_sender(terms(seeded=True), seeded) is None
    assert check_model("ab", TERMS, policy()) is None
    assert check_model("ab", TERMS, policy(models=("ab",))) is None
    assert "frozen" in str(check_model("cd", TERMS, policy()))
    assert "policy.models" in str(check_model("ab", TERMS, policy(models=("cd",))))

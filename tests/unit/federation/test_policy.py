"""The client decides: what client.toml may say, and which requests it refuses before anything is computed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dpfed.errors import DpfedError
from dpfed.federation.messages import ClippingTerms, Terms
from dpfed.federation.policy import Policy, build, check, check_model, check_sender, load
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry

TERMS = Terms(
    run="run-1", server="hub", client="clinic-0", index=0, seed=7, seeded=False, round=2, rounds=3, local_steps=5,
    clients=3, cohort=3, lr=0.01, algorithm={"name": "dp-fedavg", "lr": 0.1}, model="ab", rate=0.05, expected=5.0,
    sigma=1.0, clip=0.5, clipping=ClippingTerms("flat", 0.01, 0.5, 0.2, 10.0), grid=True,
    equal_phi=True, rows=0, head="", used=0,
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
    assert check(TERMS, policy(), STEP, []) is None
    assert (
        check(TERMS, policy(algorithms=("dp-fedavg",), max_local_steps=5, max_rate=0.05), STEP, [])
        is None
    )
    assert check(terms(grid=False), policy(require_grid=False), STEP, []) is None


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
    assert what in str(check(terms(**changed), policy(**keys), STEP, []))


def test_epsilon_counts_the_whole_history_and_this_round() -> None:
    after_three = epsilon([(STEP, 15)], 1e-5).value
    for margin, refused in ((1.001, False), (0.999, True)):
        reason = check(TERMS, policy(max_epsilon=after_three * margin), STEP, [(STEP, 10)])
        assert (reason is not None) is refused
    assert "policy.max_epsilon" in str(
        check(TERMS, policy(max_epsilon=after_three * 0.999), STEP, [(STEP, 10)])
    )
    other = [(Mechanism("poisson", 0.05, 0.5), 40)]  # spent in another run
    assert check(TERMS, policy(max_epsilon=after_three * 1.001), STEP, other) is not None


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


@pytest.mark.parametrize(
    ("section", "key", "value", "what"),
    [
        ("policy", "max_epsilon", None, "lacks policy.max_epsilon"),
        ("policy", "records", None, "lacks policy.records"),
        ("client", "servers", None, "lacks client.servers"),
        ("client", "servers", [], "client.servers"),
        ("client", "name", "a\nb", "client.name"),
        ("policy", "max_epsilon", -1.0, "policy.max_epsilon"),
        ("policy", "delta", 1e-12, "delta"),
        ("policy", "delta", 0.5, "policy.delta = 0.5 is at least 1 / .*policy.allow_large_delta"),
        ("policy", "max_distance", float("inf"), "policy.max_distance"),
        ("policy", "algorithms", ["dp-fedavgg"], "did you mean dp-fedavg"),
        ("policy", "max_eps", 1.0, "max_eps"),
        ("data", "name", "nothing", "data.name"),
        ("data", "clients", 3, "data.clients deals records"),
        ("model", "name", None, "model.name"),
    ],
)
def test_a_mistake_in_client_toml_is_one_sentence(
    section: str, key: str, value: Any, what: str
) -> None:
    raw = {name: dict(table) for name, table in RAW.items()}
    raw[section].pop(key, None)
    if value is not None:
        raw[section][key] = value
    with pytest.raises(DpfedError, match=what):
        build(raw, registry())


def test_a_mistyped_key_is_named_before_the_one_that_is_lacking_for_it() -> None:
    with pytest.raises(
        DpfedError, match=r"policy\.max_epsilonn is not a key .* did you mean max_epsilon"
    ):
        build({**RAW, "policy": {"records": 10, "max_epsilonn": 3.0}}, registry())


def test_other_sections_and_values_that_are_no_tables_are_refused() -> None:
    with pytest.raises(DpfedError, match="polcy"):
        build({**RAW, "polcy": {}}, registry())
    with pytest.raises(DpfedError, match="must be a table"):
        build({**RAW, "policy": 3}, registry())


def test_a_file_is_read_and_its_state_folder_lies_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    file.write_text(
        '[client]\nname = "a"\nstate = "mine"\nservers = ["hub"]\n[policy]\nrecords = 10\nmax_epsilon = 1.0\n'
        '[data]\nname = "digits"\n[model]\nname = "linear"\n'
    )
    config = load(file, registry())
    assert Path(config.client.state) == tmp_path / "mine"
    assert (config.policy.records, config.client.allow_seeded) == (10, False)
    with pytest.raises(DpfedError, match="cannot be read"):
        load(tmp_path / "none.toml", registry())
    file.write_text("[client")
    with pytest.raises(DpfedError, match="not valid TOML"):
        load(file, registry())

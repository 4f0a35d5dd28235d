"""Privacy statements: hand-computed figures, rounding, the schema, and what comes first."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import dpfed
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry
from dpfed.report.page import write_page
from dpfed.report.statement.build import (
    SCHEMA,
    Guarantee,
    Statement,
    statement_of,
    statement_of_run,
)
from dpfed.report.statement.registry import REGISTRY_SCHEMA, registry_entry
from dpfed.report.statement.text import first_line, page, rows
from dpfed.studies.study_reader import read_study
from dpfed.training.budget.recorded_spending import RecordedSpending, read_recorded_spending
from dpfed.training.run import run

RELEASED = {"release": "the model may be released", "algorithm": "dp-fedavg"}
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
# Every client draws all its records in each of 2 x 2 steps, with noise 2: mu = sqrt(4) / 2 = 1.
GAUSSIAN = [
    "model.name=linear",
    "data.clients=4",
    "data.partition=iid",
    "run.rounds=2",
    "run.local_steps=2",
    "run.participation=1",
    "privacy.rate=1",
    "privacy.sigma=2",
    "run.checkpoint_every=0",
]


@pytest.fixture(scope="module")
def gaussian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statement") / "run"
    run(load("digits", [*GAUSSIAN, "run.noise=os"], registry()), folder)
    return folder


def spending_of(*kinds: Mechanism, **more: Any) -> RecordedSpending:
    changes = {key: more.pop(key) for key in list(more) if key in Planned.__dataclass_fields__}
    planned = replace(Planned(kinds, 1, 1.0, ((1.0, 1),), 1e-5, largest=100), **changes)
    import numpy as np

    figures = {"epsilons": np.zeros(3), "rows": 3, "seeded": False, "void": None}
    return RecordedSpending(planned, 3, **{**figures, **more})


def stated(spending: RecordedSpending | None, **result: Any) -> Statement:
    return statement_of(spending, {**RELEASED, **result}, {})


def guarantee_of(statement: Statement) -> Guarantee:
    assert statement.guarantee is not None
    return statement.guarantee


def test_a_run_of_pure_gaussians_has_hand_computed_figures(gaussian: Path) -> None:
    statement = statement_of_run(gaussian)
    guarantee = guarantee_of(statement)
    assert guarantee.mu.value == pytest.approx(1.0, rel=1e-3)
    assert guarantee.mu.value is not None
    assert guarantee.mu.value >= 1.0
    # Phi(Phi^-1(FPR) + 1)
    rates = [attack.true_positive_rate for attack in guarantee.attack]
    assert rates == pytest.approx([0.018293, 0.092361, 0.389143], abs=1e-4)
    spending = read_recorded_spending(gaussian)
    server, third = guarantee.observers
    assert (server.epsilon, third.epsilon) == (spending.server_worst, spending.third_party)
    assert guarantee.participation.counted_rounds == 2
    assert guarantee.participation.client_choice == "uniform"
    assert guarantee.participation.max_rounds_per_client is None
    assert statement.ledger_head is not None
    assert len(statement.ledger_head) == 64
    assert statement.software["dpfed"] == dpfed.__version__


def test_delta_is_compared_with_the_records(gaussian: Path) -> None:
    delta = guarantee_of(statement_of_run(gaussian)).delta
    result = json.loads((gaussian / "run.json").read_text())
    assert delta.largest_client == result["largest_client"]
    assert delta.all_records == result["records"]
    assert delta.times_all_records == pytest.approx(1e-5 * result["records"])
    weak = guarantee_of(stated(spending_of(Mechanism("poisson", 1.0, 4.0), delta=0.002))).delta
    assert "a tenth of 1 / 100" in weak.warnings[0]
    old = guarantee_of(stated(spending_of(Mechanism("poisson", 1.0, 4.0)))).delta
    assert (old.all_records, old.times_all_records) == (None, None)


def test_an_older_run_bounds_all_records_by_the_largest_client(
    gaussian: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(gaussian, tmp_path / "old")
    result = json.loads((tmp_path / "old" / "run.json").read_text())
    records = result.pop("records")
    (tmp_path / "old" / "run.json").write_text(json.dumps(result))
    found = guarantee_of(statement_of_run(tmp_path / "old")).delta.all_records
    assert found == 4 * result["largest_client"] >= records


def test_published_figures_are_rounded_in_the_safe_direction() -> None:
    kind = Mechanism("poisson", 0.123456789, 1.98765)
    statement = stated(spending_of(kind, delta=1.23456789e-6))
    guarantee = guarantee_of(statement)
    text = dict(rows(statement))
    epsilon = float(text["Server"].split()[1].rstrip(";"))
    assert guarantee.observers[0].epsilon <= epsilon < guarantee.observers[0].epsilon + 1e-3
    assert guarantee.mu.value is not None
    mu = float(text["Mu"].split(":")[0])
    assert guarantee.mu.value <= mu < guarantee.mu.value + 1e-3
    assert "1.23457e-06" in text["Delta"]
    assert "rate 0.1235;" in text["Mechanism"]
    assert "multiplier 1.987;" in text["Mechanism"]
    shown = [float(part.split(" %")[0]) / 100 for part in text["Attack"].split("at most ")[1:]]
    for value, attack in zip(shown, guarantee.attack, strict=True):
        assert attack.true_positive_rate <= value < attack.true_positive_rate + 1e-3


def test_the_page_fits_one_sheet(gaussian: Path) -> None:
    lines = page(statement_of_run(gaussian)).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("(")
    assert "-differential privacy against the server" in lines[0]


@pytest.mark.parametrize(
    ("spending", "result", "first"),
    [
        (None, {"release": "no privacy"}, "NO PRIVACY: this model was trained without"),
        (
            spending_of(Mechanism("poisson", 0.1, 1.0), seeded=True),
            {},
            "NOT FOR RELEASE: the noise was seeded",
        ),
        (
            spending_of(Mechanism("poisson", 0.1, 1.0)),
            {"release": "simulation: not for release"},
            "NOT FOR RELEASE: the noise was seeded",
        ),
        (
            spending_of(Mechanism("poisson", 0.1, 1.0), uncounted=True),
            {},
            "NOT ALL COUNTED: epsilon holds only if",
        ),
    ],
)
def test_what_weakens_a_statement_is_its_first_line(
    spending: RecordedSpending | None, result: dict[str, Any], first: str
) -> None:
    statement = stated(spending, **result)
    assert page(statement).startswith(first)
    assert first_line(statement).startswith(first)
    VALIDATOR.validate(statement.as_dict())


def test_a_run_without_privacy_states_no_figure(tmp_path: Path) -> None:
    keys = [key for key in GAUSSIAN if not key.startswith("privacy")]
    run(load("digits", [*keys, "privacy.enabled=false"], registry()), tmp_path / "r")
    statement = statement_of_run(tmp_path / "r")
    assert page(statement).startswith("NO PRIVACY")
    assert statement.guarantee is None
    assert "epsilon" not in page(statement).lower()


def test_fixed_size_batches_have_attack_rates_and_no_mu() -> None:
    statement = stated(spending_of(Mechanism("fixed_wor", 0.1, 2.0)))
    guarantee = guarantee_of(statement)
    assert guarantee.mu.value is None
    assert guarantee.accountant.name == "RDP"
    assert guarantee.adjacency == "replace one"
    assert "none:" in dict(rows(statement))["Mu"]
    VALIDATOR.validate(statement.as_dict())


def test_the_json_form_fits_the_schema(gaussian: Path) -> None:
    VALIDATOR.check_schema(VALIDATOR.schema)
    found = statement_of_run(gaussian).as_dict()
    VALIDATOR.validate(found)
    assert not VALIDATOR.is_valid({**found, "format": 2})
    assert not VALIDATOR.is_valid({**found, "seed": 3})
    without = {key: value for key, value in found.items() if key != "ledger_head"}
    assert not VALIDATOR.is_valid(without)
    assert not VALIDATOR.is_valid({**found, "guarantee": None})
    weak = {**found["guarantee"], "attack": []}
    assert not VALIDATOR.is_valid({**found, "guarantee": weak})


def test_the_draft_for_the_registry_fits_its_schema(gaussian: Path) -> None:
    statement = statement_of_run(gaussian)
    found = json.loads(json.dumps(registry_entry(statement)))
    schema = json.loads(REGISTRY_SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(found)
    deployment = found["deployment"]
    parameters = deployment["privacy_loss"]["privacy_parameters"]
    server = guarantee_of(statement).observers[0]
    assert parameters == {"epsilon": server.epsilon, "delta": 1e-5}
    assert deployment["deployment_model"]["model_name"] == "Federated"
    assert str(statement.ledger_head) in deployment["administrative"]["notes"]
    # A misspelt key, or a value that the registry does not permit, is refused.
    for wrong in ({**found, "tiers": 2}, {**found, "status": "draft"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate(wrong)
    with pytest.raises(DpfedError, match="no entry in the registry"):
        registry_entry(stated(None))


def test_a_statement_names_no_participant(gaussian: Path) -> None:
    text = json.dumps(statement_of_run(gaussian).as_dict()) + page(statement_of_run(gaussian))
    result = json.loads((gaussian / "run.json").read_text())
    for secret in ("server_max", 'seed"', result["run"], "cohort"):
        assert secret not in text


def test_repeated_rounds_and_caps_are_stated() -> None:
    void = "a round was attempted more than once, so it equals the server's figure"
    spending = spending_of(Mechanism("poisson", 0.1, 1.0), void=void, most_rounds=3)
    # The plan allowed two rounds, and a client was charged for three.
    spending = replace(spending, planned=replace(spending.planned, chances=((1.0, 5),), cap=2))
    settings = {"run": {"cohort_choice": "balanced"}}
    statement = statement_of(spending, RELEASED, settings)
    guarantee = guarantee_of(statement)
    server, third = guarantee.observers
    assert (third.condition, third.epsilon) == (void, server.epsilon)
    assert guarantee.participation.counted_rounds == 3
    said = dict(rows(statement))["Participation"]
    assert "balanced choice of clients, a cap of 3 rounds for each client" in said
    VALIDATOR.validate(statement.as_dict())


def test_damaged_settings_leave_fields_empty() -> None:
    spending = spending_of(Mechanism("poisson", 0.1, 1.0))
    settings = {"run": {"cohort_choice": math.nan}, "privacy": {"clip": math.nan}}
    for damaged in (settings, {"run": 3, "privacy": []}):
        guarantee = guarantee_of(statement_of(spending, RELEASED, damaged))
        assert guarantee.mechanism.clip is None
        VALIDATOR.validate(statement_of(spending, RELEASED, damaged).as_dict())


def test_only_runs_have_statements(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="is not the folder of a run"):
        statement_of_run(tmp_path)


def test_an_edited_ledger_has_no_statement(gaussian: Path, tmp_path: Path) -> None:
    import shutil
    import sqlite3

    shutil.copytree(gaussian, tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / "ledger.sqlite") as db:
        db.execute("DROP TRIGGER charge_edit")
        db.execute("UPDATE charge SET steps = 1 WHERE seq = 2")
    db.close()
    with pytest.raises(DpfedError):
        statement_of_run(tmp_path / "copy")


def test_python_and_the_page_show_the_same_statement(gaussian: Path, tmp_path: Path) -> None:
    trained = dpfed.load(gaussian)
    assert trained.privacy == statement_of_run(gaussian)
    assert trained.privacy_page == page(trained.privacy)
    for public in (False, True):
        write_page([gaussian], tmp_path / "page.html", public, read_study)
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert dict(rows(trained.privacy))["Attack"] in text
        assert trained.privacy.ledger_head in text

"""What was spent before is counted, and what cannot be counted is refused or said in every artefact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpfed.api import _saved
from dpfed.config import Config, build
from dpfed.engine.accounts import read_accounts
from dpfed.engine.prior import past_of, spending_of
from dpfed.engine.run import NO_PRIVACY, RELEASABLE, SIMULATION, run
from dpfed.engine.setup import plan_of
from dpfed.engine.spending import budget_of
from dpfed.errors import DpfedError
from dpfed.privacy.accounting import epsilon
from dpfed.privacy.ledger import Charge, Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry
from dpfed.report.card import write_export

STEP = ["poisson", 0.1, 2.0, 1, 1, 40]


def config_of(**sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "data": {"clients": 4, "partition": "iid"},
        "model": {"name": "glyph-vit", "lora": {"r": 2}, "liveness": False},
        "algorithm": {"name": "dp-fedavg"},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {"rounds": 1, "local_steps": 1, "participation": 0.5, "device": "cpu"},
    }
    return build({section: {**table, **sections.get(section, {})} for section, table in raw.items()}, registry())


def stored(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    content = {
        "format": 1,
        "release": RELEASABLE,
        "delta": 1e-6,
        "unit": "record",
        "history": [STEP],
        "uncounted": False,
    }
    (folder / "dpfed.json").write_text(json.dumps({**content, **changes}))
    return str(folder)


@pytest.mark.parametrize("key", ["adapter", "weights"])
def test_what_was_spent_is_counted_wherever_a_run_starts_from(key: str, tmp_path: Path) -> None:
    past = past_of(config_of(model={key: stored(tmp_path / "a")}))
    assert past.prior == ((Mechanism("poisson", 0.1, 2.0), 40),)
    assert not past.uncounted
    plan, schedule = plan_of(config_of())
    planned = budget_of(plan, schedule, 1e-5, past=past).planned
    assert planned.server_worst == epsilon([*past.prior, (plan.mechanism(0), 1)], 1e-5).value


def test_both_starts_add_up(tmp_path: Path) -> None:
    both = {"adapter": stored(tmp_path / "a"), "weights": stored(tmp_path / "b")}
    assert len(past_of(config_of(model=both)).prior) == 2


@pytest.mark.parametrize(("before", "now"), [("record", "patient"), ("patient", None)])
def test_costs_of_other_units_do_not_add_up(before: str, now: str | None, tmp_path: Path) -> None:
    adapter = stored(tmp_path / "a", unit=before)
    data = {} if now is None else {"unit_column": now}
    with pytest.raises(DpfedError, match=f"protect each {before}, this run protects each {now or 'record'}"):
        past_of(config_of(model={"adapter": adapter}, data=data))
    past_of(config_of(model={"adapter": adapter}, data=data, privacy={"enabled": False, "sigma": 0.0}))


def test_a_simulation_does_not_become_releasable_by_training_on(tmp_path: Path) -> None:
    adapter = stored(tmp_path / "a", release=SIMULATION)
    with pytest.raises(DpfedError, match="trained with seeded noise"):
        past_of(config_of(model={"adapter": adapter}, run={"noise": "os"}))
    assert past_of(config_of(model={"adapter": adapter})).prior


def test_a_start_without_accounts_is_uncounted(tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    none = stored(tmp_path / "none", release=NO_PRIVACY, history=[], unit=None, uncounted=True)
    after = stored(tmp_path / "after", uncounted=True)
    for adapter in (str(unknown), none, after):
        past = past_of(config_of(model={"adapter": adapter}))
        assert past.uncounted
        assert past.notes
    assert not past_of(config_of(model={"weights": str(unknown)})).uncounted
    assert past_of(config_of()).notes == ()


@pytest.mark.parametrize("damage", [{"history": []}, {"history": [[*STEP[:-1], 0]]}, {"format": 2}, {"unit": None}])
def test_a_damaged_file_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="is damaged"):
        past_of(config_of(model={"adapter": stored(tmp_path / "a", **damage)}))


def test_an_uncounted_start_is_said_in_every_artefact(tmp_path: Path) -> None:
    said = "holds only if what it started from was not trained on these clients' records"
    run(config_of(privacy={"enabled": False}), tmp_path / "open")
    write_export(tmp_path / "open", tmp_path / "x")
    assert json.loads((tmp_path / "x" / "dpfed.json").read_text())["uncounted"]
    result = run(config_of(model={"adapter": str(tmp_path / "x")}, run={"noise": "os"}), tmp_path / "private")
    assert said in result["guarantee"]
    assert said in read_accounts(tmp_path / "private").planned.assumptions()
    write_export(tmp_path / "private", tmp_path / "y")
    assert said in (tmp_path / "y" / "README.md").read_text()
    assert json.loads((tmp_path / "y" / "dpfed.json").read_text())["uncounted"]


def test_repeated_attempts_are_in_what_is_handed_on(tmp_path: Path) -> None:
    """A client that was charged three times in a plan of one round: the file says three."""
    config = config_of(model={"name": "linear", "lora": {}, "train": "full"}, run={"noise": "os", "participation": 1.0})
    run(config, tmp_path / "r")
    before = read_accounts(tmp_path / "r")
    plan, _ = plan_of(config)
    name = json.loads((tmp_path / "r" / "run.json").read_text())["run"]
    with Ledger.open(tmp_path / "r" / "ledger.sqlite", run=name) as ledger:
        for _ in range(2):
            ledger.charge([Charge(2, 1, 1, plan.mechanism(2), "os")])
    accounts = read_accounts(tmp_path / "r")
    assert spending_of(RELEASABLE, before)["history"] == [["poisson", float(plan.rates[0]), 1.0, 1, 1, 1]]
    assert spending_of(RELEASABLE, accounts)["history"] == [["poisson", float(plan.rates[0]), 1.0, 1, 1, 3]]
    assert accounts.realised.rdp_server_worst >= accounts.server_worst > before.server_worst
    assert accounts.realised.curve([1.0])[0][1] > before.planned.curve([1.0])[0][1]
    assert accounts.third_party == accounts.server_worst
    assert replace(accounts, most_rounds=1).realised is accounts.planned


def test_a_model_in_memory_keeps_the_account_of_the_folder_it_came_from(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    tiny = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    BertModel(tiny).save_pretrained(stored(tmp_path / "export"))
    loaded = BertModel.from_pretrained(tmp_path / "export")
    base = _saved(loaded, None, tmp_path / "run")
    assert past_of(config_of(model={"weights": str(base)})).prior
    assert not past_of(config_of(model={"weights": str(_saved(BertModel(tiny), None, tmp_path / "new"))})).prior


def test_another_kind_of_sampling_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = config_of(
        model={"adapter": stored(tmp_path / "a")}, privacy={"sampling": "fixed_wor"}, data={"clients": 5}
    )
    plan, schedule = plan_of(config)
    with pytest.raises(DpfedError, match="mixes Poisson and fixed-size sampling"):
        budget_of(plan, schedule, 1e-5, past=past_of(config)).check()

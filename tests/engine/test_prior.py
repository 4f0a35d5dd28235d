"""What was spent on an adapter before is never forgotten, and never added up where it does not add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.config import Config
from dpfed.data.tables import Source, Table
from dpfed.engine.accounts import read_accounts
from dpfed.engine.prior import SPENDING, prior_of, spending_of
from dpfed.engine.run import run
from dpfed.engine.spending import Spending, budget_of
from dpfed.errors import DpfedError, StoppedError
from dpfed.privacy.accounting import epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.statement import Planned
from dpfed.privacy.views import Rounds, third_party_rounds_epsilon
from dpfed.report.card import write_export
from export_case import images, settings, vit_run

DELTA = 1e-5
FIRST = Mechanism("poisson", 0.5, 1.0)  # 6 of 12 records, what the runs below do


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and the adapter of a first run: 2 rounds of 2 steps, one of two clients in each."""
    tmp = tmp_path_factory.mktemp("start")
    write_export(vit_run(tmp, "first"), tmp / "adapter")
    return tmp


def go_on(
    start: Path, out: Path, adapter: str | Path = "adapter", source: Any = None, **changes: Any
) -> dict[str, Any]:
    result: dict[str, Any] = run(config_of(start, adapter, **changes), out, source=source or images())
    return result


def config_of(start: Path, adapter: str | Path = "adapter", **changes: Any) -> Config:
    model = {"name": "auto-image", "weights": str(start / "base"), "adapter": str(start / adapter)}
    changes.setdefault("privacy", {})
    changes["privacy"] = {"sigma": 2.0, **changes["privacy"]}
    return settings(model, **changes)


def copied(start: Path, to: Path, content: str | None) -> Path:
    """The adapter with another record beside it, or with none."""
    to.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (to / name).write_bytes((start / "adapter" / name).read_bytes())
    if content is not None:
        (to / SPENDING).write_text(content)
    return to


def test_the_record_is_the_plan_for_a_client_in_every_round(start: Path) -> None:
    stored = json.loads((start / "adapter" / SPENDING).read_text())
    assert stored["history"] == [["poisson", 0.5, 1.0, 1, 1, 4]]  # 2 rounds of 2 steps, though each took part in one
    assert (stored["delta"], stored["unit"]) == (DELTA, "record")
    assert prior_of(config_of(start)).prior == ((FIRST, 4),)


def test_epsilon_is_that_of_the_joined_history(start: Path, tmp_path: Path) -> None:
    result = go_on(start, tmp_path / "r")
    second = replace(FIRST, noise_multiplier=2.0)
    joined = epsilon([(FIRST, 4), (second, 4)], DELTA).value
    assert result["epsilon"]["server_worst"] == pytest.approx(joined, rel=1e-6)
    assert joined > epsilon([(FIRST, 4)], DELTA).value
    mixed = third_party_rounds_epsilon([Rounds(FIRST, 4), Rounds(second, 2, 2, 0.5)], DELTA)
    assert result["epsilon"]["third_party"] == pytest.approx(mixed, rel=1e-6)
    assert mixed < joined
    assert "with 4 local steps spent before on the adapter it started from" in result["guarantee"]
    accounts = read_accounts(tmp_path / "r")
    assert accounts.server_worst == pytest.approx(joined, rel=1e-6)
    assert accounts.server_max == pytest.approx(result["epsilon"]["server_max"], rel=1e-6)
    taken = [2 * json.loads(line)["cohort"] for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert sum(taken) == 4
    assert accounts.epsilons.min() >= epsilon([(FIRST, 4)], DELTA).value - 1e-9  # who never took part has spent that


def test_who_never_took_part_has_still_spent_what_was_before(start: Path, tmp_path: Path) -> None:
    go_on(start, tmp_path / "r", run={"rounds": 1})
    least, most = sorted(read_accounts(tmp_path / "r").epsilons)
    assert least == pytest.approx(epsilon([(FIRST, 4)], DELTA).value)
    assert most == pytest.approx(epsilon([(FIRST, 4), (replace(FIRST, noise_multiplier=2.0), 2)], DELTA).value)


def test_privacy_of_the_configuration_and_of_the_run_agree(start: Path, tmp_path: Path) -> None:
    source = images()
    np.savez(
        tmp_path / "data.npz",
        x_train=source.train.inputs["pixel_values"],
        y_train=source.train.labels,
        x_test=source.test.inputs["pixel_values"],
        y_test=source.test.labels,
    )
    config = config_of(start, data={"name": "npz", "path": str(tmp_path / "data.npz"), "classes": 3})
    run(config, tmp_path / "r")
    told = []
    for target in (tmp_path / "r", tmp_path / "r" / "config.toml"):
        result = CliRunner().invoke(app, ["privacy", str(target), "--json"])
        assert result.exit_code == 0, result.output
        told.append(json.loads(result.stdout.splitlines()[-1]))
    for key in ("server_worst", "third_party", "rdp_server_worst", "guarantee", "delta", "sigma"):
        assert (
            told[0][key] == pytest.approx(told[1][key])
            if isinstance(told[0][key], float)
            else told[0][key] == told[1][key]
        )
    assert told[0]["server_worst"] == pytest.approx(
        epsilon([(FIRST, 4), (replace(FIRST, noise_multiplier=2.0), 4)], DELTA).value
    )


def test_a_budget_counts_what_was_before(start: Path, tmp_path: Path) -> None:
    spent = epsilon([(FIRST, 4)], DELTA).value
    second = replace(FIRST, noise_multiplier=2.0)
    one = epsilon([(FIRST, 4), (second, 2)], DELTA).value
    two = epsilon([(FIRST, 4), (second, 4)], DELTA).value
    plenty = {"run": {"rounds": 5}, "privacy": {"budget": (one + two) / 2}}
    with pytest.raises(StoppedError, match="only 0 clients are within"):
        go_on(start, tmp_path / "r", **plenty)
    assert json.loads((tmp_path / "r" / "run.json").read_text())["rounds"] == 2  # each client once
    assert read_accounts(tmp_path / "r").server_max == pytest.approx(one)
    with pytest.raises(StoppedError, match="before round 1"):
        go_on(start, tmp_path / "none", privacy={"budget": spent * 0.9})


def test_a_target_is_refused_before_anything_is_written(start: Path, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"a target would be passed: give privacy\.sigma"):
        go_on(start, tmp_path / "r", privacy={"target_epsilon": 50.0, "sigma": None})
    assert not (tmp_path / "r").exists()


# ---- records that are damaged, missing or edited

GOOD = {
    "format": 1,
    "release": "released",
    "delta": 1e-5,
    "unit": "record",
    "history": [["poisson", 0.5, 1.0, 1, 1, 4]],
}


def edited(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def row(**changes: Any) -> str:
    names = ("sampling", "rate", "noise", "batches", "releases", "steps")
    return edited(history=[[changes.get(n, v) for n, v in zip(names, GOOD["history"][0], strict=True)]])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        edited(format=2),
        edited(history=[]),
        edited(history=None),
        edited(history=[[]]),
        edited(history=[["poisson"]]),
        edited(release=None),
        edited(release="no privacy"),  # with a history
        edited(unit=None),
        json.dumps({k: v for k, v in GOOD.items() if k != "unit"}),
        row(sampling="shuffle"),
        row(sampling=["poisson"]),
        row(rate=0),
        row(rate=1.5),
        row(rate="0.5"),
        row(rate=float("nan")),
        row(noise=0),
        row(noise=-1.0),
        row(noise=float("inf")),
        row(batches=0),
        row(releases=1.5),
        row(steps=0),
        row(steps=-4),
        row(steps=3.9),
        row(steps="4"),
        row(steps=True),
        row(steps=10**30),
        edited(history=[["poisson", 0.5, 1.0, 1, 1, 4], ["fixed_wor", 0.5, 1.0, 1, 1, 4]]),
    ],
)
def test_a_record_that_cannot_be_true_is_refused(start: Path, tmp_path: Path, content: str) -> None:
    copied(start, tmp_path / "copy", content)
    with pytest.raises(DpfedError, match=r"dpfed\.json is damaged: without it nobody knows"):
        prior_of(config_of(start, tmp_path / "copy"))


def test_what_cannot_be_read_is_not_what_is_not_there(start: Path, tmp_path: Path) -> None:
    one = copied(start, tmp_path / "folder", None)
    (one / SPENDING).mkdir()
    two = copied(start, tmp_path / "link", None)
    (two / SPENDING).symlink_to(tmp_path / "gone")
    for adapter in (one, two):
        with pytest.raises(DpfedError, match="damaged"):
            prior_of(config_of(start, adapter))


def test_an_edited_record_changes_the_figure_and_the_ledger_keeps_it(start: Path, tmp_path: Path) -> None:
    """The file can be edited, but what it said is in the ledger for good."""
    adapter = copied(start, tmp_path / "copy", row(steps=40))
    go_on(start, tmp_path / "r", adapter)
    before = read_accounts(tmp_path / "r").server_worst
    (adapter / SPENDING).write_text(row(steps=1))
    after = read_accounts(tmp_path / "r")
    assert after.server_worst == before
    assert after.planned.prior == ((FIRST, 40),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no record of what was spent on it"),
        (edited(release="no privacy", unit=None, delta=None, history=[]), "was trained without privacy"),
    ],
)
def test_a_start_of_unknown_cost_is_said_beside_every_epsilon(
    start: Path, tmp_path: Path, content: str | None, words: str
) -> None:
    adapter = copied(start, tmp_path / "copy", content)
    notes: list[str] = []
    config = config_of(start, adapter, run={"noise": "os"})
    result = run(config, tmp_path / "r", source=images(), begin=lambda job: notes.extend(job.notes))
    assert any(words in note and "not trained on these clients' records" in note for note in notes)
    alone = epsilon([(replace(FIRST, noise_multiplier=2.0), 4)], DELTA).value
    assert result["epsilon"]["server_worst"] == pytest.approx(alone, rel=1e-3)
    write_export(tmp_path / "r", tmp_path / "out")
    for text in (
        result["guarantee"],
        (tmp_path / "out" / "README.md").read_text(),
        CliRunner().invoke(app, ["privacy", str(tmp_path / "r")]).stdout,
    ):
        assert words in text
        assert "holds if it knew none of these clients' records" in text


def test_a_slip_in_the_path_is_no_new_adapter(start: Path, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"has no adapter_config\.json"):
        prior_of(config_of(start, tmp_path / "adaptor"))
    assert prior_of(settings({"name": "auto-image"})).prior == ()


# ---- what does not add up


def test_other_sampling_is_refused_in_one_sentence(start: Path, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r'do not add up: set privacy\.sampling = "poisson"') as error:
        go_on(start, tmp_path / "r", privacy={"sampling": "fixed_wor"})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "r").exists()


def test_another_protected_unit_is_refused(start: Path, tmp_path: Path) -> None:
    """One record's cost says nothing of what one patient with many records has spent."""
    changes = {"data": {"unit_column": "patient"}}
    with pytest.raises(DpfedError, match=r"one record as the protected unit and this run protects one patient"):
        go_on(start, tmp_path / "r", **changes)
    adapter = copied(start, tmp_path / "copy", edited(unit="patient"))
    with pytest.raises(DpfedError, match=r"one patient as the protected unit and this run protects one record"):
        prior_of(config_of(start, adapter))
    assert prior_of(config_of(start, adapter, **changes)).prior == ((FIRST, 4),)


def test_a_run_without_privacy_may_start_from_anything(start: Path, tmp_path: Path) -> None:
    result = go_on(start, tmp_path / "r", privacy={"enabled": False, "sampling": "fixed_wor"})
    assert result["release"] == "no privacy"
    assert result["epsilon"]["server_worst"] is None


def test_fixed_sampling_adds_up_with_itself(start: Path, tmp_path: Path) -> None:
    content = row(sampling="fixed_wor", noise=4.0)
    adapter = copied(start, tmp_path / "copy", content)
    result = go_on(start, tmp_path / "r", adapter, privacy={"sampling": "fixed_wor", "sigma": 4.0})
    kind = Mechanism("fixed_wor", 0.5, 4.0)
    assert result["epsilon"]["server_worst"] == pytest.approx(epsilon([(kind, 8)], DELTA).value)


# ---- chains


def test_seeded_noise_stays_seeded(start: Path, tmp_path: Path) -> None:
    """Whoever removes the first run's noise has the first run's records, however well the second one is protected."""
    result = go_on(start, tmp_path / "r", run={"noise": "os"})
    assert result["release"] == "simulation: not for release"
    assert read_accounts(tmp_path / "r").seeded  # for `dpfed privacy`
    write_export(tmp_path / "r", tmp_path / "out")
    assert "**Not for release.**" in (tmp_path / "out" / "README.md").read_text()
    assert prior_of(config_of(start, tmp_path / "out")).seeded
    clean = copied(start, tmp_path / "copy", edited())
    assert go_on(start, tmp_path / "s", clean, run={"noise": "os"})["release"].startswith("the model may be released")


def test_a_chain_of_two_exports(start: Path, tmp_path: Path) -> None:
    go_on(start, tmp_path / "second")
    write_export(tmp_path / "second", tmp_path / "adapter2")
    third = go_on(start, tmp_path / "third", tmp_path / "adapter2", privacy={"sigma": 3.0})
    kinds = [(replace(FIRST, noise_multiplier=s), 4) for s in (1.0, 2.0, 3.0)]
    assert third["epsilon"]["server_worst"] == pytest.approx(epsilon(kinds, DELTA).value, rel=1e-6)
    write_export(tmp_path / "third", tmp_path / "adapter3")
    stored = json.loads((tmp_path / "adapter3" / SPENDING).read_text())
    assert [(r[2], r[5]) for r in stored["history"]] == [(1.0, 4), (2.0, 4), (3.0, 4)]


def test_what_is_carried_on_costs_at_least_as_much_as_any_client() -> None:
    """Of two kinds the one that is dearer now (3.93 against 2.97) is cheaper after more is added (10.40 against 10.69)."""
    much, little = Mechanism("poisson", 0.5, 2.5), Mechanism("poisson", 0.05, 0.7)
    planned = Planned((much, little), 5, 1.0, ((1.0, 2),), DELTA)
    later = (Mechanism("poisson", 0.2, 1.0), 50)
    carried = epsilon([*planned.carried, later], DELTA).value
    assert planned.worst_kind == little
    after = {kind: epsilon([(kind, 10), later], DELTA).value for kind in planned.kinds}
    assert after[little] < after[much] <= carried
    assert Planned((replace(much, rate=0.1), much), 5, 1.0, ((1.0, 2),), DELTA).carried == [(much, 10)]


def unequal(clients: int) -> Source:
    """Clients of different sizes, each with its own rate."""
    rng = np.random.default_rng(0)
    sizes = np.arange(12, 12 + clients)
    owners = np.repeat(np.arange(clients), sizes)
    labels = np.arange(len(owners)) % 3
    x = rng.integers(0, 255, (len(owners), 3, 8, 8)).astype(np.uint8)
    test = Table({"pixel_values": x[:6]}, labels[:6])
    return Source(Table({"pixel_values": x}, labels, {"owner": owners}), test, ("a", "b", "c"), "image")


def test_many_kinds_of_clients(start: Path, tmp_path: Path) -> None:
    """More than eight mechanisms: one that costs at least as much as each stands for them, in the same way everywhere."""
    changes = {
        "data": {"partition": "natural", "client_column": "owner"},
        "privacy": {"batch_per_client": True},
        "run": {"participation": 1.0, "rounds": 1},
    }
    result = go_on(start, tmp_path / "r", source=unequal(9), **changes)
    accounts = read_accounts(tmp_path / "r")
    dearest = Mechanism("poisson", 6 / 12, 2.0)
    want = epsilon([(FIRST, 4), (dearest, 2)], DELTA).value
    assert len(accounts.planned.kinds) == 9
    assert accounts.server_worst == pytest.approx(want)
    assert accounts.server_max == pytest.approx(want)  # the smallest client took part
    assert result["epsilon"]["server_worst"] == pytest.approx(accounts.server_worst)
    assert result["epsilon"]["server_max"] == pytest.approx(accounts.server_max)
    least = epsilon([(FIRST, 4), (replace(dearest, rate=6 / 20), 2)], DELTA).value
    assert accounts.epsilons.min() == pytest.approx(least)
    stored = spending_of("released", accounts)
    assert stored["history"][1] == ["poisson", 0.5, 2.0, 1, 1, 2]


def test_spending_of_many_kinds_is_a_bound_in_every_round() -> None:
    sizes = np.linspace(100, 140, 12).round()
    plan = Plan("poisson", 1.0, sizes, 10 / sizes, np.full(12, 10.0), np.full(12, 2.0))
    prior = ((FIRST, 4),)
    budget = budget_of(plan, Schedule(12, 3, 40, 5), DELTA, prior=prior)
    job: Any = type("Job", (), {"plan": plan, "schedule": Schedule(12, 3, 40, 5)})()
    job.config = settings({"name": "auto-image"})
    spending = Spending(job, budget, None)
    spending.taken[[2, 5]] = (3, 7)
    shown = spending.server_max()
    assert shown is not None
    true = max(epsilon([*prior, (plan.mechanism(i), 5 * int(spending.taken[i]))], DELTA).value for i in (2, 5))
    assert true <= shown <= budget.planned.server_worst


def test_what_a_number_allows_is_asked_of_every_kind() -> None:
    """At delta 1e-5 the second kind has the larger epsilon, at epsilon 0.5 the first has the larger delta."""
    much, little = Mechanism("poisson", 0.5, 2.5), Mechanism("poisson", 0.05, 0.7)
    planned = Planned((much, little), 5, 1.0, ((1.0, 2),), DELTA, prior=((FIRST, 1),))
    alone = [Planned((kind,), 5, 1.0, ((1.0, 2),), DELTA, prior=((FIRST, 1),)) for kind in planned.kinds]
    deltas = [each.curve([0.5])[0][1] for each in alone]
    assert deltas[0] > deltas[1]
    assert planned.curve([0.5]) == [(0.5, max(deltas))]
    assert planned.histories == [each.histories[0] for each in alone]
    assert planned.tuned(3) == max(each.tuned(3) for each in alone)

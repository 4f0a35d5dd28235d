"""Cohorts: balanced and uniform choice, the cap on a client's rounds, and what epsilon counts."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from callback_case import Watcher
from command import dpfed
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_case import SOURCE, CrashError
from safetensors.torch import load_file
from torch import equal

from dpfed.config import Config, PrivacySection, build, load
from dpfed.config.sections import CohortChoice
from dpfed.errors import DpfedError, StoppedError
from dpfed.privacy.accounting.guarantee import CAPPED
from dpfed.privacy.accounting.planner import PlanNumbers
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Schedule, make_plan
from dpfed.registry import registry
from dpfed.report.tables import Row
from dpfed.studies.output import _privacy_notes
from dpfed.training.budget.participation import choose_cohort, eligible_clients
from dpfed.training.budget.prior_spending import record_of
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.open_run import Mode
from dpfed.training.rounds import Round
from dpfed.training.run import run

FIXTURES = Path(__file__).parents[3] / "fixtures"
DELTA = 1e-5
# With this seed, uniform cohorts leave out one client in the first four rounds.
SHORT_OF_CLIENTS = 2


# ---- the choice


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    clients = draw(st.integers(1, 7))
    cohort = draw(st.integers(1, clients))
    rounds = draw(st.integers(1, 12))
    least = -(-rounds * cohort // clients)
    choice: CohortChoice = draw(st.sampled_from(["balanced", "uniform"]))
    max_rounds = draw(st.integers(least, rounds))
    return Schedule(clients, cohort, rounds, 1, choice, max_rounds)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_no_client_exceeds_its_cap_over_drop_outs_and_repeated_rounds(
    schedule: Schedule, seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    requests = np.zeros(schedule.clients, dtype=np.int64)
    answers = np.zeros(schedule.clients, dtype=np.int64)
    attempts = [t for t in range(schedule.rounds) for _ in range(1 + (rng.random() < share / 2))]
    for _ in attempts:
        able = eligible_clients(requests, schedule.cap, None)
        cohort = choose_cohort(able, requests, schedule.cohort, schedule.choice, rng)
        assert len(set(cohort)) == len(cohort) == min(schedule.cohort, len(able))
        requests[cohort] += 1
        answers[cohort] += rng.random(len(cohort)) < share
    assert schedule.cap is not None
    assert (answers <= requests).all()
    assert requests.max() <= schedule.cap


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.data())
def test_balanced_cohorts_are_full_and_differ_by_at_most_one_round(
    clients: int, data: st.DataObject
) -> None:
    cohort = data.draw(st.integers(1, clients))
    rounds = data.draw(st.integers(1, 12))
    cap = -(-rounds * cohort // clients)
    schedule = Schedule(clients, cohort, rounds, 1, "balanced")
    assert schedule.most_rounds == cap
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    requests = np.zeros(clients, dtype=np.int64)
    for _ in range(rounds):
        able = eligible_clients(requests, cap, None)
        chosen = choose_cohort(able, requests, cohort, "balanced", rng)
        assert len(chosen) == cohort
        requests[chosen] += 1
        assert requests.max() - requests.min() <= 1
    assert requests.max() == cap


def test_a_choice_that_counts_answers_breaks_the_cap() -> None:
    """A client that never answers would be asked again and again."""
    schedule = Schedule(4, 1, 4, 1, "balanced")
    rng = np.random.default_rng(0)
    requests = np.zeros(4, dtype=np.int64)
    answers = np.zeros(4, dtype=np.int64)
    for _ in range(4):
        able = eligible_clients(answers, schedule.cap, None)
        (chosen,) = choose_cohort(able, answers, 1, "balanced", rng)
        requests[chosen] += 1
        answers[chosen] += chosen != 0
    for _ in range(4):
        able = eligible_clients(answers, schedule.cap, None)
        requests[choose_cohort(able, answers, 1, "balanced", rng)] += 1
    assert requests[0] > (schedule.cap or 0)


def test_the_fewest_requests_are_chosen_and_ties_at_random() -> None:
    requests = np.array([2, 0, 1, 0, 5])
    rng = np.random.default_rng(0)
    everyone = np.arange(5)
    assert choose_cohort(everyone, requests, 3, "balanced", rng) == [1, 2, 3]
    assert choose_cohort(np.array([0, 4]), requests, 3, "balanced", rng) == [0, 4]
    assert eligible_clients(requests, 2, None).tolist() == [1, 2, 3]
    assert eligible_clients(requests, None, np.array([3, 0, 1, 1, 9])).tolist() == [0, 3, 4]
    assert eligible_clients(requests, 2, np.array([3, 0, 1, 1, 9])).tolist() == [3]
    draws = 900
    tied = [choose_cohort(everyone, np.zeros(5), 2, "balanced", rng) for _ in range(draws)]
    share = np.bincount(np.ravel(tied), minlength=5) / draws
    assert np.abs(share - 0.4).max() < 5 * np.sqrt(0.4 * 0.6 / draws)
    assert len(set(map(tuple, tied))) == 10


# ---- the cap and the noise


def test_the_cap_of_a_schedule() -> None:
    assert Schedule(50, 5, 100, 20).cap is None
    assert Schedule(50, 5, 100, 20).most_rounds == 100
    assert Schedule(50, 5, 100, 20, "balanced").cap == 10
    assert Schedule(7, 3, 5, 20, "balanced").cap == 3
    assert Schedule(7, 7, 5, 20, "balanced").cap is None
    assert Schedule(7, 3, 5, 20, "uniform", 4).cap == 4
    assert Schedule(7, 3, 5, 20, "uniform", 99).cap == 5
    with pytest.raises(DpfedError, match=r"run\.max_rounds_per_client = 9 is too small: .*use 10"):
        Schedule(50, 5, 100, 20, "uniform", 9)


@pytest.mark.parametrize(
    ("batch", "choice", "sigma"),
    [
        (16, "uniform", 1.000),
        (16, "balanced", 0.676),
        (64, "balanced", 1.209),
        (256, "balanced", 3.767),
        (1000, "balanced", 14.18),
    ],
)
def test_fewer_rounds_of_a_client_need_less_noise(
    batch: float, choice: CohortChoice, sigma: float
) -> None:
    """1000 records per client, 5 of 50 clients, 100 rounds of 20 steps, epsilon 4.363."""
    section = PrivacySection(target_epsilon=4.363, delta=DELTA, batch=batch)
    schedule = Schedule(50, 5, 100, 20, choice)
    plan = make_plan(section, np.full(50, 1000), schedule, 1, 1)
    assert float(plan.multipliers[0]) == pytest.approx(sigma, rel=0.01)


def test_the_view_decides_the_rounds_of_the_calibration() -> None:
    step = Mechanism("poisson", 0.1, 1.0)
    balanced = Schedule(50, 5, 100, 20, "balanced", 15)
    seen = {view: balanced.rounds_for(step, view) for view in ("server_worst", "third_party")}
    assert [(r.rounds, r.probability) for r in seen.values()] == [(15, 1.0)] * 2
    expected = balanced.rounds_for(step, "server_expected")
    assert (expected.rounds, expected.probability) == (100, 0.1)
    uniform = replace(balanced, choice="uniform", max_rounds="auto")
    assert uniform.rounds_for(step, "third_party").probability == 0.1


# ---- runs


def config_of(**keys: Any) -> Config:
    """Return five clients of 20 records; two take part in each of five rounds."""
    privacy = {"batch": 4, "delta": DELTA, **keys.pop("privacy", {"sigma": 2.0})}
    table = {
        "rounds": 5,
        "local_steps": 2,
        "participation": 0.4,
        "lr_schedule": "constant",
        "device": "cpu",
        "cohort_choice": "balanced",
        **keys,
    }
    raw = {
        "data": {"name": "digits", "clients": 5},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedavg", "lr": 0.1},
        "privacy": privacy,
        "run": table,
    }
    return build(raw, registry())


def go(config: Config, out: Path, mode: Mode = "new", crash: int | None = None) -> dict[str, Any]:
    def observe(round: Round) -> None:
        if round.t == crash:
            raise CrashError

    if crash is None:
        return run(config, out, mode, SOURCE)
    with pytest.raises(CrashError):
        run(config, out, mode, SOURCE, [Watcher(on_round=observe)])
    return {}


def cohorts(out: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        for row in ledger.rows():
            if not row.charge.void:
                found[row.charge.round].append(int(row.charge.client))
    return dict(found)


def charges(out: Path) -> np.ndarray:
    return np.bincount(np.concatenate(list(cohorts(out).values())), minlength=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("whole") / "r"
    return out, go(config_of(), out)


def test_a_balanced_run_gives_each_client_the_rounds_of_its_cap(whole: Any) -> None:
    out, result = whole
    assert charges(out).tolist() == [2] * 5
    kind = Mechanism("poisson", 0.2, 2.0)
    by_hand = epsilon([(kind, 2 * 2)], DELTA)
    figures = result["epsilon"]
    assert figures["server_worst"] == pytest.approx(by_hand, rel=1e-9)
    assert figures["server_max"] == figures["server_worst"] == figures["third_party"]
    assert result["max_rounds_per_client"] == 2
    assert "each client in at most 2 rounds" in result["guarantee"]


def test_configuration_ledger_card_and_report_state_equal_figures(
    whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, result = whole
    worst = result["epsilon"]["server_worst"]
    recorded = read_recorded_spending(out)
    assert recorded.planned.cap == 2
    assert recorded.realised is recorded.planned
    assert (recorded.server_worst, recorded.third_party) == (worst, worst)
    assert recorded.void == CAPPED
    assert recorded.planned.assumptions() == result["guarantee"]
    for target in (out, out / "config.toml"):
        capsys.readouterr()
        assert dpfed("privacy", str(target), "--json") == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["third_party"] == found["server_worst"]
        assert found["max_rounds_per_client"] == 2
        assert "each client in at most 2 rounds" in found["guarantee"]
        # The configuration alone has the data's own sizes, not those of this small run.
        if target == out:
            assert found["server_worst"] == pytest.approx(worst, rel=1e-9)
            assert found["guarantee"] == result["guarantee"]
        assert dpfed("privacy", str(target)) == 0
        said = capsys.readouterr().out
        assert "the server, of a client in 2 of 5 rounds, its cap" in said
        assert f"third party: {CAPPED}." in said
    assert dpfed("export", str(out), str(tmp_path / "model")) == 0
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "a client in 2 of 5 rounds, its cap" in card
    assert "a cap of 2 rounds for each client" in card
    stored = record_of(str(tmp_path / "model"))
    assert stored is not None
    assert [steps for _, steps in stored.prior] == [2 * 2]
    assert dpfed("report", str(out), "--out", str(tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a client in 2 of 5 rounds, its cap" in page


def test_a_resumed_run_chooses_the_same_cohorts(whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "r"
    go(config_of(), out, crash=3)
    go(config_of(), out, "resume")
    assert cohorts(out) == cohorts(whole[0])
    one, two = (load_file(folder / "model.safetensors") for folder in (out, whole[0]))
    assert all(equal(one[name], two[name]) for name in one)


def test_a_killed_run_with_real_noise_keeps_the_cap(tmp_path: Path) -> None:
    """The charge of a lost attempt counts, so no client takes part in more than two rounds."""
    out = tmp_path / "r"
    charge = Ledger.charge

    def killed(self: Ledger, rows: Any, run: str | None = None) -> Any:
        charge(self, rows, run)
        if rows[0].round == 3:
            raise CrashError

    config = config_of(noise="os", min_clients=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", killed)
        with pytest.raises(CrashError):
            run(config, out, source=SOURCE)
    with pytest.raises(StoppedError, match=r"before round 5 only 0 clients .* the run ends"):
        go(config, out, "resume")
    assert {len(cohort) for cohort in cohorts(out).values()} == {2, 4}
    assert charges(out).tolist() == [2] * 5
    recorded = read_recorded_spending(out)
    assert recorded.server_worst == recorded.planned.server_worst
    assert recorded.void is not None


def test_added_rounds_raise_an_automatic_cap(whole: Any, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole[0], tmp_path / "r"))
    longer = config_of(rounds=8)
    result = go(longer, out, "resume")
    assert result["max_rounds_per_client"] == 4
    assert charges(out).max() == 4
    assert charges(out).min() == 3
    assert read_recorded_spending(out).planned.cap == 4


def test_a_budget_and_a_cap_hold_together(tmp_path: Path) -> None:
    """The budget allows one round and the cap two, so that round 3 has one client left."""
    kind = Mechanism("poisson", 0.2, 2.0)
    budget = epsilon([(kind, 2)], DELTA) * 1.001
    keys = {"privacy": {"sigma": 2.0, "budget": budget}}
    limits = r"within privacy\.budget = .* and 2 rounds of a client \(run\.max_rounds_per_client\)"
    with pytest.raises(StoppedError, match=f"before round 4 only 0 clients can stay {limits}"):
        go(config_of(**keys, min_clients=1), tmp_path / "r")
    assert charges(tmp_path / "r").tolist() == [1] * 5
    with pytest.raises(StoppedError, match="before round 3 only 1 client can stay within"):
        go(config_of(**keys), tmp_path / "s")
    assert sorted(charges(tmp_path / "s").tolist()) == [0, 1, 1, 1, 1]


def test_a_cap_may_leave_too_few_clients(tmp_path: Path) -> None:
    """With uniform cohorts the last rounds may miss clients, and run.min_clients decides."""
    keys = {"cohort_choice": "uniform", "max_rounds_per_client": 2, "seed": SHORT_OF_CLIENTS}
    with pytest.raises(StoppedError, match="before round 5 only 1 client can stay within 2 rounds"):
        go(config_of(**keys), tmp_path / "r")
    assert sorted(charges(tmp_path / "r").tolist()) == [0, 2, 2, 2, 2]
    found = go(config_of(**keys, min_clients=1), tmp_path / "s")
    assert sorted(charges(tmp_path / "s").tolist()) == [1, 2, 2, 2, 2]
    assert found["epsilon"]["third_party"] == found["epsilon"]["server_worst"]


def test_other_cohorts_on_resume_are_refused(tmp_path: Path) -> None:
    go(config_of(), tmp_path / "r", crash=2)
    for keys in ({"cohort_choice": "uniform"}, {"max_rounds_per_client": 3}):
        with pytest.raises(DpfedError, match=rf"run\.{next(iter(keys))} was"):
            go(config_of(**keys), tmp_path / "r", "resume")


def test_a_plan_that_cannot_fill_its_cohorts_is_refused(tmp_path: Path) -> None:
    sentence = r"max_rounds_per_client = 1 is too small: 5 rounds of 2 clients .*use 2 or more"
    with pytest.raises(DpfedError, match=sentence):
        run(config_of(max_rounds_per_client=1), tmp_path / "r", source=SOURCE)
    assert not (tmp_path / "r").exists()


# ---- earlier versions, presets and options


def test_files_of_earlier_versions_mean_uniform_cohorts_without_a_cap(tmp_path: Path) -> None:
    out = Path(shutil.copytree(FIXTURES / "run-0.1", tmp_path / "r"))
    config = load(out / "config.toml", [], registry())
    assert (config.run.cohort_choice, config.run.max_rounds_per_client) == ("uniform", "auto")
    recorded = read_recorded_spending(out)
    assert recorded.planned.cap is None
    assert "each client in at most" not in recorded.planned.assumptions()
    keys = ["run.rounds=6", "run.cohort_choice=balanced"]
    with pytest.raises(DpfedError, match=r"run\.cohort_choice was None .* 'balanced' now"):
        run(load(out / "config.toml", keys, registry()), out, "resume")


def test_the_papers_presets_are_uniform_and_the_best_is_balanced() -> None:
    known = registry()
    chosen = {name: load(name, [], known).run.cohort_choice for name in known.presets}
    papers = {name for name in chosen if name.startswith("paper/")}
    assert papers
    assert {chosen[name] for name in papers} == {"uniform"}
    assert {chosen["best"], chosen["best-head"]} == {"balanced"}


def numbers(**changes: Any) -> PlanNumbers:
    given = {
        "records": 1000,
        "batch": 16.0,
        "rounds": 100,
        "local_steps": 20,
        "sigma": 1.0,
        "target_epsilon": None,
        "participation": 0.1,
        "delta": DELTA,
        "sampling": "poisson",
        "batches": 1,
        "releases": 1,
        "view": "server_worst",
        "clients": None,
        "colluding": 0,
    }
    return PlanNumbers(**{**given, **changes})


def test_the_option_max_rounds() -> None:
    kind = Mechanism("poisson", 0.016, 1.0)
    planned = numbers(max_rounds=10).planned()
    assert planned.server_worst == pytest.approx(epsilon([(kind, 200)], DELTA), rel=1e-9)
    assert planned.third_party == planned.server_worst
    assert planned.server_after(4) == pytest.approx(epsilon([(kind, 80)], DELTA), rel=1e-9)
    assert planned.server_after(50) == planned.server_worst
    for view in ("server_worst", "third_party"):
        found = numbers(max_rounds=10, sigma=None, target_epsilon=4.363, view=view).planned()
        assert found.kinds[0].noise_multiplier == pytest.approx(0.676, rel=0.01)
    with pytest.raises(DpfedError, match=r"--max-rounds 9 is too small: .* use 10 or more"):
        numbers(max_rounds=9).planned()
    assert numbers().planned().cap is None


def test_the_command_takes_max_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "--records 1000 --batch 16 --rounds 10 --local-steps 2 --sigma 1 --participation 0.1"
    assert dpfed("privacy", *plan.split(), "--max-rounds", "1") == 0
    assert "the server, of a client in 1 of 10 rounds, its cap" in capsys.readouterr().out


def test_the_notes_of_a_study_name_the_rounds_that_count() -> None:
    def note(max_rounds: int | None) -> str:
        guarantee = numbers(max_rounds=max_rounds).planned().assumptions()
        row = Row(label="a", scores=(), epsilon={"server_worst": 1.0}, guarantee=guarantee)
        return _privacy_notes([row])[0]

    assert "for a client in every round (server)" in note(None)
    assert "for a client in the most rounds it may take (server)" in note(10)

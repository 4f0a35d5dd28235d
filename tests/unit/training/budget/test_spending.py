"""Epsilons hold for every client: unequal clients, budgets, repeated attempts, resumes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from callback_case import Watcher
from hypothesis import given
from hypothesis import strategies as st

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma
from dpfed.privacy.accounting.eligibility import chances, fewest_eligible
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.accounting.observers import server_epsilon
from dpfed.privacy.accounting.pld import delta_at, epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan, Schedule
from dpfed.registry import registry
from dpfed.training.budget.ledgers import recorded_multipliers
from dpfed.training.budget.recorded_spending import read_recorded_spending, with_least_noise
from dpfed.training.budget.spending import budget_of, coarser
from dpfed.training.job.job import Job, prepare
from dpfed.training.job.plan import plan_of
from dpfed.training.rounds import Round
from dpfed.training.run import run


@pytest.fixture
def unequal(tmp_path: Path) -> list[str]:
    """Return settings with one small client, which has the largest epsilon, and five large ones."""
    rng = np.random.default_rng(0)
    sizes = [40] + [300] * 5
    owners = np.repeat([f"client-{i}" for i in range(6)], sizes)
    x = rng.normal(size=(len(owners), 4)).astype(np.float32)
    y = rng.integers(2, size=len(owners))
    path = tmp_path / "unequal.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:50], y_test=y[:50], train_owner=owners)
    return [
        "data.name=npz",
        "data.partition=natural",
        "data.client_column=owner",
        "data.classes=2",
        "model.name=linear",
        "privacy.batch=16",
        "privacy.batch_per_client=true",
        "run.participation=0.17",
        "run.rounds=2",
        "run.local_steps=2",
        f"data.path={path}",
    ]


def absent_seed(keys: list[str]) -> int:
    """Return a seed with which the costly client is never drawn."""
    from dpfed.training.round_loop import choose

    for seed in range(50):
        job = prepare(load("digits", [*keys, f"run.seed={seed}"], registry()))
        if all(0 not in choose(job, t, np.arange(6), np.zeros(6)) for t in (1, 2)):
            return seed
    raise AssertionError("no such seed")


def test_clients_that_were_not_drawn_count_in_the_worst_figure(
    unequal: list[str], tmp_path: Path
) -> None:
    keys = [*unequal, "privacy.sigma=1.0"]
    config = load("digits", [*keys, f"run.seed={absent_seed(keys)}"], registry())
    result = run(config, tmp_path / "r")
    accounts = read_recorded_spending(tmp_path / "r")
    assert accounts.epsilons[0] == 0
    assert accounts.server_worst == pytest.approx(result["epsilon"]["server_worst"])
    assert accounts.third_party == pytest.approx(result["epsilon"]["third_party"])
    assert accounts.server_worst == pytest.approx(
        server_epsilon(Mechanism("poisson", 0.4, 1.0), 2, 2, 1e-5)
    )


def test_a_sigma_per_client_is_reported_as_a_range(unequal: list[str], tmp_path: Path) -> None:
    keys = [*unequal, "privacy.target_epsilon=2", "privacy.sigma_per_client=true"]
    plan, schedule = plan_of(load("digits", keys, registry()))
    assert len(plan.kinds()[0]) == 2
    planned = budget_of(plan, schedule, 1e-5).planned
    assert planned.server_worst <= 2
    assert planned.server_worst == pytest.approx(2, rel=2e-3)
    assert planned.third_party <= planned.server_worst
    assert " to " in planned.assumptions()


def exhaustion(limits: list[int], cohort: int, rounds: int) -> list[int]:
    """Try every sequence of cohorts; return the fewest clients left before each round."""
    fewest = []
    states = {tuple(limits)}
    for _ in range(rounds):
        fewest.append(min(sum(left > 0 for left in state) for state in states))
        following = set()
        for state in states:
            able = [i for i, left in enumerate(state) if left > 0]
            for chosen in combinations(able, min(cohort, len(able))):
                following.add(tuple(left - (i in chosen) for i, left in enumerate(state)))
        states = following or states
    return fewest


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4), st.integers(1, 2), st.integers(1, 4))
def test_the_fewest_eligible_clients_are_a_bound(
    limits: list[int], cohort: int, rounds: int
) -> None:
    bound = [
        n for n, count in fewest_eligible(len(limits), cohort, rounds, limits) for _ in range(count)
    ]
    assert len(bound) == rounds
    assert all(b <= true for b, true in zip(bound, exhaustion(limits, cohort, rounds), strict=True))


def test_without_budgets_every_client_is_eligible() -> None:
    assert fewest_eligible(10, 3, 7, None) == [(10, 7)]
    assert chances(3, [(10, 7)]) == ((0.3, 7),)
    assert chances(3, [(10, 7)], colluding=2) == ((3 / 8, 7),)
    assert chances(3, [(3, 1), (2, 1)]) == ((1.0, 1), (1.0, 1))


def test_the_third_party_figure_holds_for_every_order_of_exhaustion() -> None:
    """Delta must hold for every sequence of the numbers of eligible clients."""
    clients, rounds, limit, delta = 5, 3, 2, 1e-5
    step = Mechanism("poisson", 0.2, 1.0)
    eligible = fewest_eligible(clients, 1, rounds, [limit] * clients)
    claimed = Planned((step,), 20, 1 / clients, chances(1, eligible), delta).third_party
    # Enumerate the rounds of client 0 for each sequence of the numbers of eligible clients.
    courses: dict[tuple[int, ...], dict[int, float]] = {}

    def walk(t: int, taken: tuple[int, ...], course: tuple[int, ...], p: float) -> None:
        if t == rounds:
            counts = courses.setdefault(course, {})
            counts[taken[0]] = counts.get(taken[0], 0.0) + p
            return
        able = [i for i in range(clients) if taken[i] < limit]
        for i in able:
            following = tuple(n + (j == i) for j, n in enumerate(taken))
            walk(t + 1, following, (*course, len(able)), p / len(able))

    walk(0, (0,) * clients, (), 1.0)
    assert len(courses) > 1
    for counts in courses.values():
        total = sum(counts.values())
        spent = sum(p / total * delta_at([(step, 20 * n)], claimed) for n, p in counts.items() if n)
        assert spent <= delta * (1 + 1e-6)


def test_limits_of_many_kinds_of_clients_stay_within_the_budget() -> None:
    sizes = np.linspace(100, 140, 12).round()
    expected = np.full(12, 10.0)
    plan = Plan("poisson", 1.0, sizes, expected / sizes, expected, np.full(12, 2.0))
    schedule = Schedule(12, 3, 40, 5)
    budget = budget_of(plan, schedule, 1e-5, budget=1.5)
    assert budget.limits is not None
    for i in (0, 7, 11):
        limit = int(budget.limits[i])
        assert 0 < limit < 40
        assert epsilon([(plan.mechanism(i), 5 * limit)], 1e-5) <= 1.5
    made, which = coarser(plan)
    assert all(made[k].rate >= plan.rates[i] for i, k in enumerate(which))


def test_repeated_attempts_count_and_void_the_third_party_figure(tmp_path: Path) -> None:
    keys = [
        "model.name=linear",
        "run.rounds=1",
        "run.local_steps=2",
        "run.participation=0.5",
        "run.noise=os",
    ]
    folder = tmp_path / "r"
    run(load("digits", [*keys, "privacy.sigma=1.0"], registry()), folder)
    before = read_recorded_spending(folder)
    assert before.void is None
    name = json.loads((folder / "run.json").read_text())["run"]
    with Ledger.open(folder / "ledger.sqlite", run=name) as ledger:
        first = next(iter(ledger.rows())).charge
        for _ in range(4):
            ledger.charge([Charge(first.client, 1, 2, first.mechanism, "os")])
    after = read_recorded_spending(folder)
    assert after.server_max == pytest.approx(epsilon([(first.mechanism, 10)], 1e-5))
    assert after.server_worst >= after.server_max > before.server_worst
    assert after.void is not None
    assert after.third_party == after.server_worst


def test_a_ledger_of_real_noise_is_never_deleted(tmp_path: Path) -> None:
    keys = ["model.name=linear", "run.rounds=1", "run.local_steps=1", "privacy.sigma=2.0"]
    folder = tmp_path / "r"
    run(load("digits", [*keys, "run.noise=os"], registry()), folder)
    rows = read_recorded_spending(folder).rows
    with pytest.raises(DpfedError, match="real noise"):
        run(load("digits", keys, registry()), folder, "replace")
    assert read_recorded_spending(folder).rows == rows


def test_real_noise_needs_declared_classes_and_whole_units(unequal: list[str]) -> None:
    real = [key for key in unequal if "classes" not in key] + ["privacy.sigma=1.0", "run.noise=os"]
    with pytest.raises(DpfedError, match=r"data\.classes"):
        prepare(load("digits", real, registry()))
    unchecked = [*unequal, "privacy.sigma=1.0", "run.noise=os", "model.liveness=false"]
    with pytest.raises(DpfedError, match=r"set model\.liveness = true"):
        prepare(load("digits", unchecked, registry()))
    scattered = [*unequal, "data.partition=iid", "data.client_column=owner", "privacy.sigma=1.0"]
    with pytest.raises(DpfedError, match="natural"):
        prepare(load("digits", scattered, registry()))
    unit = [key for key in unequal if "client_column" not in key]
    unit += [
        "data.partition=iid",
        "data.unit_column=owner",
        "privacy.sigma=1.0",
        "run.noise=os",
        "data.clients=3",
    ]
    with pytest.raises(DpfedError, match="scatter"):
        prepare(load("digits", unit, registry()))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["privacy.delta=1e-12", "privacy.sigma=1"], "delta"),
        (["privacy.sigma=1e-6"], "protects nothing"),
        (
            ["privacy.rate=0.1", "privacy.sigma=1", "privacy.batch_per_client=true"],
            "batch_per_client",
        ),
        (["privacy.enabled=false", "privacy.budget=1"], "budget"),
    ],
)
def test_invalid_numbers_are_refused_before_anything_is_written(
    tmp_path: Path, keys: list[str], words: str
) -> None:
    with pytest.raises(DpfedError, match=words):
        run(load("digits", ["model.name=linear", *keys], registry()), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_planned_epsilons_are_finite_and_ordered() -> None:
    planned = Planned((Mechanism("poisson", 0.5, 1.0),), 3, 0.5, ((0.5, 4),), 1e-5)
    assert math.isfinite(planned.server_worst)
    assert planned.third_party <= planned.server_worst
    assert planned.rdp_server_worst >= planned.server_worst


class CrashError(Exception):
    """A simulated kill of the process."""


def interrupted(keys: list[str], folder: Path, noise_factor: float) -> list[float]:
    """Crash after round 2 of a run whose calibration differs by a factor; return its noise."""

    def other_root(*settings: Any) -> float:
        return noise_factor * calibrate_sigma(*settings)

    def crash(round: Round) -> None:
        if round.t == 2:
            raise CrashError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpfed.privacy.plan.calibrate_sigma", other_root)
        with pytest.raises(CrashError):
            run(load("digits", keys, registry()), folder, callbacks=[Watcher(on_round=crash)])
        return plan_of(load("digits", keys, registry()))[0].multipliers.tolist()


@pytest.mark.parametrize("per_client", ["true", "false"])
@pytest.mark.parametrize("noise_factor", [1 - 1.3e-5, 1 + 9e-5])
def test_a_resumed_run_adds_and_charges_the_noise_that_its_ledger_records(
    unequal: list[str], tmp_path: Path, per_client: str, noise_factor: float
) -> None:
    """Another version may calibrate another sigma for the same target."""
    keys = [*unequal, "privacy.target_epsilon=2", f"privacy.sigma_per_client={per_client}"]
    keys += ["run.rounds=4", "run.noise=os"]
    folder = tmp_path / "r"
    recorded = interrupted(keys, folder, noise_factor)
    jobs: list[Job] = []
    result = run(
        load("digits", keys, registry()),
        folder,
        "resume",
        callbacks=[Watcher(on_start=jobs.append)],
    )
    assert jobs[0].plan.multipliers.tolist() == recorded
    with Ledger.open(folder / "ledger.sqlite", readonly=True) as ledger:
        assert ledger.rounds_charged(ledger.meta["owner"])[-1] == 4
        for row in ledger.rows():
            assert row.charge.mechanism.noise_multiplier == recorded[int(row.charge.client)]
    assert read_recorded_spending(folder).server_worst == result["epsilon"]["server_worst"]


def test_a_ledger_with_very_different_noise_is_refused(unequal: list[str], tmp_path: Path) -> None:
    keys = [*unequal, "privacy.target_epsilon=2", "run.rounds=4"]
    interrupted(keys, tmp_path / "r", 1 + 2e-4)
    with pytest.raises(DpfedError, match="written for another kinds"):
        run(load("digits", keys, registry()), tmp_path / "r", "resume")


def test_recorded_noise_is_found_in_the_rows_where_the_statement_is_a_grid(tmp_path: Path) -> None:
    """A statement of more than 500 mechanisms has rounded values."""
    sizes = np.arange(100, 701)
    expected = np.full(601, 10.0)
    old = Plan("poisson", 1.0, sizes, expected / sizes, expected, np.full(601, 2.0))
    stated = [[kind.rate, kind.noise_multiplier] for kind in coarser(old)[0]]
    with Ledger.create(tmp_path / "l.sqlite", run="r", kinds=stated) as ledger:
        new = replace(old, multipliers=np.full(601, 2.0 * (1 + 1e-5)))
        assert recorded_multipliers(new, ledger).tolist() == new.multipliers.tolist()
        ledger.charge([Charge(3, 1, 2, old.mechanism(3), "os")])
        assert recorded_multipliers(new, ledger).tolist() == old.multipliers.tolist()


def test_a_report_on_a_server_counts_the_smaller_of_recorded_and_calibrated_noise() -> None:
    sizes = np.array([100, 200])
    expected = np.array([10.0, 20.0])
    plan = Plan("poisson", 1.0, sizes, expected / sizes, expected, np.array([2.0, 4.0]))
    assert with_least_noise(plan, None) is plan
    assert with_least_noise(plan, [2.0001, 4.0001]) is plan
    # A record far below the calibrated noise counts too, or epsilon would be too small.
    for ratio in (0.9995, 0.5):
        least = with_least_noise(plan, [2.0 * ratio, 4.0]).multipliers
        assert least.min() == pytest.approx(2.0 * ratio, rel=1e-12)
    lower = with_least_noise(plan, [2.0, 4.0 * (1 - 1e-5)]).multipliers
    assert lower == pytest.approx([2.0 * (1 - 1e-5), 4.0 * (1 - 1e-5)], rel=1e-12)
    equal = replace(plan, multipliers=np.array([2.0, 2.0]))
    assert with_least_noise(equal, 1.99999).multipliers == pytest.approx([1.99999] * 2, rel=1e-12)


def test_recorded_noise_that_misses_the_target_is_refused(
    unequal: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wide tolerance only the check of the target stands between the ledger and the run."""
    keys = [*unequal, "privacy.target_epsilon=2", "run.rounds=4", "run.noise=os"]
    interrupted(keys, tmp_path / "r", 0.99)
    monkeypatch.setattr("dpfed.training.budget.ledgers.CALIBRATION_TOLERANCE", 0.05)
    with pytest.raises(DpfedError, match=r"does not reach privacy\.target_epsilon = 2"):
        run(load("digits", keys, registry()), tmp_path / "r", "resume")

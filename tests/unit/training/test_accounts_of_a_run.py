"""Accounts of a run: budgets in rounds, charged rounds and epsilons, during and after it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dpfed.errors import DpfedError, StoppedError
from dpfed.privacy.accounting.guarantee import MAX_EXACT_KINDS, PriorSpending
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.plan import Plan, Schedule
from dpfed.training.budget.ledgers import run_ledger
from dpfed.training.budget.recorded_spending import own_spending, read_recorded_spending
from dpfed.training.budget.spending import (
    MOST_KINDS,
    RoundsCharged,
    Spending,
    budget_of,
    coarser,
    rounds_charged,
)
from dpfed.training.job.job import Job

DELTA = 1e-5
STEPS = 2
STEP = Mechanism("poisson", 0.1, 1.0)
PRIOR = ((Mechanism("poisson", 0.2, 1.5), 7),)


def plan_of(
    rates: Sequence[float],
    sampling: Sampling = "poisson",
    sigma: float = 1.0,
    batches: int = 1,
    releases: int = 1,
) -> Plan:
    sizes = np.full(len(rates), 1000.0)
    found = np.asarray(rates, dtype=float)
    noise = np.full(len(rates), sigma)
    return Plan(
        sampling, 1.0, sizes, found, found * sizes, noise, batches=batches, releases=releases
    )


def job_of(plan: Plan, rounds: int = 4, budget: float | None = None, cohort: int = 1) -> Job:
    """Return the parts of a job that accounts need."""
    config = SimpleNamespace(
        privacy=SimpleNamespace(delta=DELTA, budget=budget),
        run=SimpleNamespace(min_clients=None, noise="os"),
    )
    schedule = Schedule(plan.clients, cohort, rounds, STEPS)
    return cast(Job, SimpleNamespace(plan=plan, schedule=schedule, config=config))


def spending_of(
    job: Job,
    taken: Sequence[int],
    past: PriorSpending | None = None,
    attempts: dict[int, int] | None = None,
    **keys: Any,
) -> Spending:
    privacy = job.config.privacy
    budget = budget_of(job.plan, job.schedule, DELTA, privacy.budget, past=past or PriorSpending())
    return Spending(job, budget, None, RoundsCharged(np.array(taken), attempts or {}), **keys)


def costs(plan: Plan, taken: Sequence[int], prior: Any = ()) -> list[float]:
    """Return each client's epsilon by the definition."""
    histories = [[*prior, (plan.mechanism(i), STEPS * n)] for i, n in enumerate(taken)]
    return [epsilon(history, DELTA) for history in histories]


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [(), PRIOR])
@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_a_budget_allows_as_many_rounds_as_fit(rounds: int, prior: Any) -> None:
    """A budget slightly below the epsilon of `rounds` rounds allows one round less."""
    plan, schedule = plan_of([0.1, 0.1]), Schedule(2, 1, 4, STEPS)
    exact = epsilon([*prior, (STEP, STEPS * rounds)], DELTA)
    for budget, allowed in ((exact, rounds), (exact * (1 - 1e-9), rounds - 1)):
        found = budget_of(plan, schedule, DELTA, budget, past=PriorSpending(prior))
        assert found.limits is not None
        assert found.limits.tolist() == [allowed] * 2


def test_a_limit_is_at_most_the_rounds_of_the_run() -> None:
    found = budget_of(plan_of([0.1]), Schedule(1, 1, 4, STEPS), DELTA, budget=1000.0)
    assert found.limits is not None
    assert found.limits.tolist() == [4]


def test_a_client_at_its_limit_is_not_eligible() -> None:
    limit = 2
    budget = epsilon([(STEP, STEPS * limit)], DELTA)
    job = job_of(plan_of([0.1] * 4), budget=budget)
    spending = spending_of(job, [0, 1, 2, 3])
    assert spending.eligible().tolist() == [0, 1]
    spending.charge(1, [1])
    assert spending.eligible().tolist() == [0]
    spending.charge(2, [0])
    spending.charge(3, [0])
    with pytest.raises(
        StoppedError, match=r"before round 4 only 0 clients can stay within privacy\.budget"
    ):
        spending.require_eligible(4)


def test_without_a_budget_all_clients_are_eligible() -> None:
    assert spending_of(job_of(plan_of([0.1] * 2)), [90, 0]).eligible().tolist() == [0, 1]


def test_rounded_mechanisms_cost_at_least_as_much_as_exact_ones() -> None:
    rng = np.random.default_rng(0)
    plan = plan_of(rng.uniform(0.01, 0.9, 60))
    noise = rng.uniform(0.5, 4.0, 60)
    plan = Plan("poisson", 1.0, plan.sizes, plan.rates, plan.expected, noise)
    made, which = coarser(plan)
    for client, kind in enumerate(which):
        assert made[kind].rate >= plan.rates[client] * (1 - 1e-12)
        assert made[kind].noise_multiplier <= noise[client] * (1 + 1e-12)


# --- charged rounds and epsilons ----------------------------------------------------------------


RATES = {
    "equal": [0.1, 0.1, 0.1],
    "few": [0.1, 0.3, 0.05],
    "many": [0.1 + 0.001 * i for i in range(MAX_EXACT_KINDS + 4)],
}


@pytest.mark.parametrize("prior", [(), PRIOR], ids=["alone", "after another"])
@pytest.mark.parametrize("rates", ["equal", "few"])
@pytest.mark.parametrize("released", [(1, 1), (2, 1), (1, 3)])
def test_server_max_is_the_largest_epsilon_of_a_client(
    released: tuple[int, int], rates: str, prior: Any
) -> None:
    batches, releases = released
    plan, taken = plan_of(RATES[rates], batches=batches, releases=releases), [4, 1, 3]
    spending = spending_of(job_of(plan), taken, PriorSpending(prior))
    assert spending.server_max() == pytest.approx(max(costs(plan, taken, prior)), rel=1e-9)


def test_server_max_of_fixed_batches_is_the_largest_epsilon() -> None:
    plan, taken = plan_of(RATES["few"], sampling="fixed_wor", releases=2), [4, 1, 3]
    assert spending_of(job_of(plan), taken).server_max() == pytest.approx(
        max(costs(plan, taken)), rel=1e-9
    )


@pytest.mark.parametrize(
    ("sampling", "prior"), [("poisson", ()), ("poisson", PRIOR), ("fixed_wor", ())]
)
def test_server_max_of_many_different_clients_is_an_upper_bound(
    sampling: Sampling, prior: Any
) -> None:
    plan = plan_of(RATES["many"], sampling=sampling)
    taken = [1] * (plan.clients - 1) + [4]
    found = spending_of(job_of(plan), taken, PriorSpending(prior)).server_max()
    assert found is not None
    costliest = [*prior, (plan.mechanism(plan.clients - 1), STEPS * 4)]
    assert found >= epsilon(costliest, DELTA) * (1 - 1e-9)


def test_every_participation_of_a_client_is_counted() -> None:
    spending = spending_of(job_of(plan_of([0.1] * 3)), [1, 0, 2])
    spending.charge(3, [0, 2])
    spending.charge(4, [2])
    assert spending.rounds_taken.tolist() == [2, 0, 4]


@pytest.mark.parametrize(
    ("attempts", "by_choice", "void"), [({1: 1}, False, 0), ({1: 2}, False, 1), ({}, True, 1)]
)
def test_without_random_cohorts_the_third_party_figure_is_the_servers(
    attempts: dict[int, int], by_choice: bool, void: bool
) -> None:
    spending = spending_of(
        job_of(plan_of([0.1] * 8)), [1] * 8, attempts=attempts, by_choice=by_choice
    )
    figures = spending.figures()
    worst, third = figures["server_worst"], figures["third_party"]
    assert worst is not None
    assert third is not None
    assert (third == worst) == void
    assert third <= worst


def test_the_worst_figure_is_at_least_the_realised_one() -> None:
    """Repeated attempts can cost more than the plan."""
    plan, taken = plan_of([0.1] * 2), [9, 0]
    figures = spending_of(job_of(plan), taken, attempts={1: 6}).figures()
    assert (
        figures["server_worst"]
        == figures["server_max"]
        == pytest.approx(max(costs(plan, taken)), rel=1e-9)
    )


def ledger_of(path: Path, cohorts: Sequence[tuple[int, Sequence[int]]]) -> Ledger:
    """Make a ledger with a charge for each (round, cohort) and one void row."""
    ledger = Ledger.create(path / "l.sqlite", run="r")
    ledger.charge([Charge("statement", 5, 9, STEP, "seeded", True, "of 9 rounds")])
    for t, cohort in cohorts:
        ledger.charge([Charge(i, t, STEPS, STEP, "os") for i in cohort])
    return ledger


def test_rounds_in_the_ledger_count_attempts_and_no_void_row(tmp_path: Path) -> None:
    with ledger_of(tmp_path, [(1, [0, 1]), (2, [2]), (2, [0])]) as ledger:
        found = rounds_charged(ledger, 4)
    assert found.rounds_taken.tolist() == [2, 1, 1, 0]
    assert found.attempts == {1: 1, 2: 2}


# --- accounts read from a folder ----------------------------------------------------------------


def folder_of(
    path: Path, plan: Plan, cohorts: Sequence[tuple[int, Sequence[int]]], prior: Any = ()
) -> Path:
    """Write the files of a run's folder that accounts need."""
    job = job_of(plan, cohort=2)
    job = cast(Job, SimpleNamespace(**vars(job), unit="record"))
    budget = budget_of(plan, job.schedule, DELTA, past=PriorSpending(prior))
    path.mkdir()
    (path / "run.json").write_text('{"run": "name", "release": "the model may be released"}')
    with run_ledger(job, budget, path / "ledger.sqlite", "name") as ledger:
        for t, cohort in cohorts:
            ledger.charge([Charge(i, t, STEPS, plan.mechanism(i), "os") for i in cohort])
    return path


@pytest.mark.parametrize("prior", [(), PRIOR], ids=["alone", "after another"])
@pytest.mark.parametrize("released", [(1, 1), (2, 1), (1, 3)])
def test_recorded_epsilons_equal_the_definition(
    released: tuple[int, int], prior: Any, tmp_path: Path
) -> None:
    plan = plan_of([0.1, 0.3, 0.05, 0.2], batches=released[0], releases=released[1])
    found = read_recorded_spending(
        folder_of(tmp_path / "r", plan, [(1, [0, 1]), (2, [1, 3])], prior)
    )
    assert found.epsilons.tolist() == pytest.approx(costs(plan, [1, 2, 0, 1], prior), rel=1e-9)
    assert found.server_max == found.epsilons.max()
    assert (found.void, found.seeded, found.most_rounds) == (
        None,
        False,
        2 if not prior else found.most_rounds,
    )


def test_accounts_of_many_different_clients_count_every_release(tmp_path: Path) -> None:
    plan = plan_of(np.linspace(0.1, 0.11, 60).tolist(), releases=3)
    found = read_recorded_spending(folder_of(tmp_path / "r", plan, [(1, list(range(60)))]))
    for client in (0, 31, 59):
        exact = epsilon([(plan.mechanism(client), STEPS)], DELTA)
        assert exact * (1 - 1e-9) <= found.epsilons[client] <= exact * 1.031


def test_a_repeated_attempt_counts_and_voids_the_third_party_figure(tmp_path: Path) -> None:
    plan = plan_of([0.1] * 4)
    cohorts = [(1, [0, 1]), *[(2, [0, 2])] * 5]
    found = read_recorded_spending(folder_of(tmp_path / "r", plan, cohorts))
    assert found.void is not None
    assert (found.most_rounds, found.realised.rounds) == (6, 6)
    assert found.server_worst == found.third_party == found.server_max
    assert found.server_worst == pytest.approx(costs(plan, [6])[0], rel=1e-9)


def test_a_partial_round_counts_as_a_whole_one(tmp_path: Path) -> None:
    plan = plan_of([0.1] * 4)
    folder = folder_of(tmp_path / "r", plan, [(t, [0, 1]) for t in range(1, 5)])
    with Ledger.open(folder / "ledger.sqlite", run="name") as ledger:
        ledger.charge([Charge(0, 4, 1, plan.mechanism(0), "os")])
    assert read_recorded_spending(folder).realised.chances == ((1.0, 5),)


def edit(path: Path, change: str) -> None:
    """Change rows of a ledger without its trigger."""
    with closing(sqlite3.connect(path)) as db, db:
        ((trigger,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'charge_edit'")
        db.execute("DROP TRIGGER charge_edit")
        db.execute(change)
        db.execute(trigger)


def test_an_edited_row_of_a_clients_ledger_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.create(path, client="clinic", delta=DELTA) as ledger:
        for t in (1, 2, 3, 4):
            ledger.charge([Charge("clinic", t, STEPS, STEP, "os")], run="r")
    before = own_spending(path)
    assert before.epsilon == pytest.approx(epsilon([(STEP, 4 * STEPS)], DELTA))
    edit(path, "UPDATE charge SET steps = 0 WHERE seq = 1")
    with pytest.raises(DpfedError, match="row 1 was edited"):
        own_spending(path)


def test_colluding_clients_enlarge_the_third_party_figure(tmp_path: Path) -> None:
    """If all others collude, the third party knows the participants like the server."""
    folder = folder_of(tmp_path / "r", plan_of([0.1] * 8), [(1, [0, 1])])
    alone, some, all_others = (
        read_recorded_spending(folder, colluding).third_party for colluding in (0, 3, 7)
    )
    assert alone < some < all_others == read_recorded_spending(folder).server_worst
    assert read_recorded_spending(folder, 3).planned.chances == ((2 / 5, 4),)


def test_a_seeded_row_makes_the_run_a_simulation(tmp_path: Path) -> None:
    plan = plan_of([0.1] * 4)
    folder = folder_of(tmp_path / "r", plan, [(1, [0, 1])])
    with Ledger.open(folder / "ledger.sqlite", run="name") as ledger:
        ledger.charge([Charge(0, 2, STEPS, plan.mechanism(0), "seeded")])
    assert read_recorded_spending(folder).seeded


def test_too_many_kinds_are_rounded_to_costlier_ones() -> None:
    rates = np.linspace(0.01, 0.9, MOST_KINDS + 1)
    planned = budget_of(plan_of(rates.tolist()), Schedule(len(rates), 1, 1, 1), DELTA).planned
    assert len(planned.kinds) <= MOST_KINDS
    assert max(kind.rate for kind in planned.kinds) >= 0.9

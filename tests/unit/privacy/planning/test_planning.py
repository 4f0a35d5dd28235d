"""Plans of federations: the automatic batch, the table of choices and the recommended plan."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dpfed
from dpfed.cli.main import app
from dpfed.config import PrivacySection, load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma, estimate_sigma
from dpfed.privacy.accounting.observers import Rounds
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Schedule, make_plan
from dpfed.privacy.planning.batch import automatic_batch, powers_of_two
from dpfed.privacy.planning.federation import Federation, FederationPlan
from dpfed.registry import registry
from dpfed.training.job.plan import plan_of

PAPER = Schedule(clients=50, cohort=5, rounds=100, local_steps=20)


@pytest.fixture(scope="module")
def paper() -> FederationPlan:
    """The plan of the paper's vision setting."""
    return dpfed.plan(1000, 4.363, clients=50, cohort=5, try_rounds=[50, 200])


# ---- the automatic batch


@pytest.mark.parametrize(
    ("largest", "powers"), [(0.4, [1]), (1, [1]), (7.9, [1, 2, 4]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two_go_up_to_the_largest(largest: float, powers: list[int]) -> None:
    assert powers_of_two(largest) == powers


def test_the_automatic_batch_is_the_first_with_at_most_5_percent_more_noise() -> None:
    # noise(B) = 1 + 1/B: full batches of 100 have 1.01, so B needs 1 + 1/B <= 1.0605, B >= 16.6.
    assert automatic_batch(lambda b: 1 + 1 / b, 100, math.inf) == 32
    # noise(B) = 1 + 0.8/B: 1.008 * 1.05 = 1.0584, B >= 13.7.
    assert automatic_batch(lambda b: 1 + 0.8 / b, 100, math.inf) == 16


@pytest.mark.parametrize(("most", "batch"), [(31.9, 16), (16, 16), (5, 4), (0.1, 1)])
def test_the_automatic_batch_stays_below_the_largest_allowed(most: float, batch: int) -> None:
    assert automatic_batch(lambda b: 1 + 1 / b, 100, most) == batch


def test_a_client_with_few_records_gets_the_largest_power_of_two() -> None:
    assert automatic_batch(lambda b: 1 / b, 20, math.inf) == 16


def privacy(**changes: object) -> PrivacySection:
    return PrivacySection(**{"target_epsilon": 4.363, "batch": "auto", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("choice", "batch"), [("balanced", 256), ("uniform", 64)])
def test_a_configuration_with_an_automatic_batch(choice: str, batch: int) -> None:
    schedule = replace(PAPER, choice=choice)
    plan = make_plan(privacy(), np.full(50, 1000), schedule, 1, 1)
    assert (plan.expected == batch).all()
    same = make_plan(privacy(batch=float(batch)), np.full(50, 1000), schedule, 1, 1)
    assert (plan.multipliers == same.multipliers).all()


def test_the_limit_on_records_counts_the_whole_cohort() -> None:
    schedule = replace(PAPER, choice="balanced", max_records=5 * 128 - 1)
    assert make_plan(privacy(), np.full(50, 1000), schedule, 1, 1).expected[0] == 64


def test_clients_of_unequal_sizes_share_the_rate_of_the_mean_client() -> None:
    sizes = np.array([500, 1500] * 25)
    plan = make_plan(privacy(), sizes, replace(PAPER, choice="balanced"), 1, 1)
    assert plan.rates == pytest.approx(0.256)
    equal = make_plan(
        privacy(batch_per_client=True), sizes, replace(PAPER, choice="balanced"), 1, 1
    )
    assert (equal.expected == equal.expected[0]).all()
    assert equal.expected[0] <= 500


def test_an_automatic_batch_needs_a_target() -> None:
    with pytest.raises(DpfedError, match=r'privacy.batch = "auto" follows from'):
        make_plan(privacy(target_epsilon=None, sigma=1.0), np.full(50, 1000), PAPER, 1, 1)


@pytest.mark.parametrize("batch", [1, 64, 1000])
def test_the_estimate_is_close_to_the_calibrated_sigma(batch: int) -> None:
    rounds = Rounds(Mechanism("poisson", batch / 1000, 1.0, 1, 1), 20, 10)
    exact = calibrate_sigma(rounds, 4.363, 1e-5)
    assert estimate_sigma(rounds, 4.363, 1e-5) == pytest.approx(exact, rel=2e-3)


def test_the_keys_of_a_configuration_reach_the_plan() -> None:
    changes = ["privacy.batch=auto", "run.max_records_per_step=85", "run.cohort_choice=balanced"]
    config = load("digits", changes, registry())
    plan, schedule = plan_of(config)
    assert schedule.cohort == 10
    assert (plan.expected == 8).all()
    assert plan.private


# ---- plans of federations


def test_the_recommended_plan_of_the_papers_setting(paper: FederationPlan) -> None:
    own = paper.recommended
    assert (own.cohorts, own.batch, own.most_rounds) == ("balanced", 256, 10)
    assert own.sigma == pytest.approx(3.767, rel=2e-3)
    # sigma C / (B sqrt(T K S)) = 3.767 / (256 * 100)
    assert own.noise == pytest.approx(3.767 / (256 * 100), rel=2e-3)
    assert own.computed == 256 * 5 * 100 * 20


def test_the_table_has_both_choices_of_cohorts(paper: FederationPlan) -> None:
    noise = {(c.cohorts, c.batch): c.noise for c in paper.choices}
    assert noise["uniform", 64] == pytest.approx(0.0466 / 100, rel=1e-2)
    assert noise["uniform", 1000] == pytest.approx(0.0449 / 100, rel=1e-2)
    assert noise["balanced", 64] == pytest.approx(0.0189 / 100, rel=1e-2)
    assert noise["balanced", 1000] == pytest.approx(0.0142 / 100, rel=1e-2)
    assert len(paper.table) == len(paper.choices) + 2


def test_other_rounds_have_their_own_batch(paper: FederationPlan) -> None:
    by_rounds = {c.rounds: c.noise for c in paper.alternatives}
    assert by_rounds[50] == pytest.approx(0.000152, rel=1e-2)
    assert by_rounds[200] == pytest.approx(0.000145, rel=1e-2)


def test_the_recommended_settings_give_the_stated_sigma(paper: FederationPlan) -> None:
    tables = tomllib.loads(str(paper).split("Recommended; paste this into your file:")[1])
    assert tables == paper.configuration
    given = tables["privacy"]
    schedule = Schedule.of(
        50, tables["run"]["rounds"], tables["run"]["local_steps"], tables["run"]["participation"]
    )
    schedule = replace(schedule, choice=tables["run"]["cohort_choice"])
    plan = make_plan(PrivacySection(**given), np.full(50, 1000), schedule, 1, 1)
    assert plan.multipliers[0] == paper.recommended.sigma


def test_noise_of_unequal_clients_is_the_mean_over_clients() -> None:
    federation = Federation(records=(100, 300), cohort=2, rounds=4, local_steps=1, epsilon=8.0)
    # Batch 20 of 200 records on average is a rate of 0.1, so 10 and 30 records. The noise of the
    # mean is half the root of the sum of variances, averaged over 4 rounds.
    expected = 3.0 * math.hypot(1 / 10, 1 / 30) / 2 / math.sqrt(4)
    assert federation.noise(3.0, 20) == pytest.approx(expected)


def test_the_plan_names_limits_of_computing_and_of_delta() -> None:
    plan = dpfed.plan(1000, 2.0, clients=4, rounds=2, local_steps=1, max_records=32, delta=1e-3)
    assert plan.recommended.batch == 8
    assert "at most 32 records in a local step" in str(plan)
    assert "Delta 0.001 is large for 1,000 records" in str(plan)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"records": 100}, "give the number of clients"),
        ({"records": [1, 2, 3], "clients": 2}, "3 numbers of records were given for 2 clients"),
        ({"records": 0, "clients": 2}, "every client needs at least one record"),
        ({"records": 10, "clients": 2, "cohort": 3}, "3 clients in each round cannot be chosen"),
        ({"records": 10, "clients": 2, "epsilon": 0}, "the target epsilon must be a number above"),
        ({"records": 10, "clients": 2, "rounds": 0}, "0 rounds are too few"),
        ({"records": 10, "clients": 2, "local_steps": 0}, "0 local steps are too few"),
        ({"records": 10, "clients": 2, "max_records": 0}, "0 records in a local step"),
        ({"records": 10, "clients": 2, "delta": 1.5}, "delta"),
        ({"records": 10, "clients": 2, "algorithm": "dp-fedadam"}, "is not known"),
    ],
)
def test_impossible_numbers_are_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(DpfedError, match=sentence):
        dpfed.plan(**{"epsilon": 1.0, **given})  # type: ignore[arg-type]


def test_the_command_prints_the_plan_and_draws_the_plot(tmp_path: Path) -> None:
    args = "plan --clients 4 --records 200 --epsilon 8 --rounds 3 --local-steps 2 --json --plot"
    result = CliRunner().invoke(app, [*args.split(), str(tmp_path / "noise.svg")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert found["settings"]["privacy"]["batch"] == found["recommended"]["batch"]
    assert found["recommended"]["cohorts"] == "balanced"
    assert "<- recommended" in result.output
    assert "<svg" in (tmp_path / "noise.svg").read_text(encoding="utf-8")


def test_the_command_names_numbers_that_it_cannot_read() -> None:
    result = CliRunner().invoke(app, ["plan", "--records", "4x", "--epsilon", "8"])
    assert isinstance(result.exception, DpfedError)
    assert "--records 4x must be whole numbers" in str(result.exception)

"""Rates, expected batches and noise follow from declared sizes, and the oracle uses them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpfed.config import PrivacySection
from dpfed.data.partition import shards_of
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.observers import server_epsilon
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, RoundTerms
from dpfed.privacy.plan import Plan, Schedule, make_plan
from dpfed.privacy.record_batch import PrivateData, Records

torch.set_num_threads(1)
SCHEDULE = Schedule.of(clients=4, rounds=3, local_steps=2, participation=0.5)


def plan_for(sizes: list[int], releases: int = 1, unit: str | None = None, **privacy: Any) -> Plan:
    settings_ = {"sigma": 1.0, **privacy}
    if settings_.get("target_epsilon"):
        settings_["sigma"] = None
    return make_plan(PrivacySection(**settings_), np.array(sizes), SCHEDULE, 1, releases, unit)


# --- batches and rates ---


def test_equal_clients_have_the_batch_that_was_asked_for() -> None:
    plan = plan_for([100] * 4, batch=16)
    assert plan.expected.tolist() == [16.0] * 4
    assert plan.rates.tolist() == [0.16] * 4
    assert plan.phi(0) == pytest.approx((1.0 * 0.1 / 16) ** 2, rel=1e-12)
    assert plan.equal_phi


def test_phi_of_the_papers_setting() -> None:
    assert plan_for([1000] * 4, batch=16).phi(3) == pytest.approx(3.906e-5, rel=1e-4)


def test_unequal_clients_share_one_rate() -> None:
    plan = plan_for([50, 100, 150, 300], batch=15)
    assert np.unique(plan.rates).tolist() == [0.1]  # 15 of the mean 150
    assert plan.expected == pytest.approx([5, 10, 15, 30])
    assert not plan.equal_phi
    assert len(plan.kinds()[0]) == 1  # one mechanism, so one epsilon for all


def test_batch_per_client_gives_all_the_same_batch_and_small_ones_a_higher_rate() -> None:
    plan = plan_for([50, 100, 150, 300], batch=15, batch_per_client=True)
    assert plan.expected.tolist() == [15.0] * 4
    assert plan.rates == pytest.approx([0.3, 0.15, 0.1, 0.05])
    assert plan.equal_phi
    assert len(plan.kinds()[0]) == 4
    assert plan.dominating().rate == pytest.approx(0.3)


def test_a_rate_is_every_clients_rate() -> None:
    plan = plan_for([50, 100, 150, 300], rate=0.2)
    assert plan.rates.tolist() == [0.2] * 4
    assert plan.expected == pytest.approx([10, 20, 30, 60])
    assert plan_for([7, 7, 7, 7], rate=1.0).expected.tolist() == [7.0] * 4


def test_a_batch_may_be_a_fraction_or_all_records() -> None:
    assert plan_for([10] * 4, batch=0.5).rates.tolist() == [0.05] * 4
    assert plan_for([10] * 4, batch=10).rates.tolist() == [1.0] * 4


def test_a_batch_larger_than_a_client_is_refused_and_the_client_named() -> None:
    with pytest.raises(
        DpfedError, match=r"privacy\.batch = 11 is larger than client 0, which has 10"
    ):
        plan_for([10] * 4, batch=11)
    with pytest.raises(DpfedError, match="client 2, which has 8"):
        plan_for([30, 30, 8, 30], batch=11, batch_per_client=True)
    with pytest.raises(
        DpfedError, match=r"privacy\.batch = 60 is larger than the mean client, 55"
    ) as error:
        plan_for([100, 10, 100, 10], batch=60)
    assert "client 0" not in str(error.value)  # which has 100, so that would be false


def test_fixed_wor_has_whole_batches() -> None:
    plan = plan_for([50, 100, 150, 300], batch=16, sampling="fixed_wor")
    assert plan.expected.tolist() == [5.0, 11.0, 16.0, 32.0]
    assert plan.rates == pytest.approx(plan.expected / plan.sizes)
    assert plan_for([2, 2, 2, 2], rate=0.01, sampling="fixed_wor").expected.tolist() == [1.0] * 4
    mechanism = plan.mechanism(1)
    assert mechanism.adjacency == "replace one"
    assert mechanism.effective_multiplier == pytest.approx(0.5)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=12),
    st.floats(0.01, 50),
    st.booleans(),
    st.sampled_from(["poisson", "fixed_wor"]),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_consistent_or_refused(
    sizes: list[int], batch: float, each: bool, sampling: str
) -> None:
    try:
        plan = plan_for(sizes, batch=batch, batch_per_client=each, sampling=sampling)
    except DpfedError:
        assert batch > (min(sizes) if each or len(set(sizes)) == 1 else np.mean(sizes))
        return
    for i, size in enumerate(sizes):
        mechanism = plan.mechanism(i)
        assert 0 < mechanism.rate <= 1
        assert plan.expected[i] == pytest.approx(mechanism.rate * size, rel=1e-12)
        assert plan.phi(i) == pytest.approx(
            (mechanism.noise_multiplier * plan.clip / plan.expected[i]) ** 2
        )
        if sampling == "fixed_wor":
            assert plan.expected[i] == round(plan.expected[i]) >= 1


# --- noise ---


def test_without_privacy_nothing_is_clipped_or_noised() -> None:
    plan = plan_for([100] * 4, batch=10, sigma=None, enabled=False)
    assert plan.clip == math.inf
    assert not plan.private
    assert [plan.noise_std(i) for i in range(4)] == [0.0] * 4  # not inf·0
    assert plan.phi(0) == 0.0
    assert plan.equal_phi


def test_sigma_zero_clips_without_noise_and_claims_nothing() -> None:
    plan = plan_for([100] * 4, batch=10, sigma=0.0)
    assert plan.clip == 0.1
    assert not plan.private
    infinite = plan_for([100] * 4, batch=10, sigma=0.0, clip=math.inf)
    assert infinite.phi(0) == 0.0
    assert infinite.noise_std(0) == 0.0


@pytest.mark.parametrize("clip", [1e-46, 1e-13, 1e13])
def test_clip_norms_beyond_single_precision_are_refused(clip: float) -> None:
    """At 1e-46 the noise would be rounded to exactly zero while the ledger still claims it."""
    with pytest.raises(DpfedError, match=r"privacy\.clip"):
        plan_for([100] * 4, batch=10, clip=clip)


def test_endless_noise_is_refused() -> None:
    with pytest.raises(DpfedError, match=r"privacy\.sigma"):
        plan_for([100] * 4, batch=10, sigma=math.inf)


def test_noise_without_a_finite_clip_norm_is_refused() -> None:
    one = np.ones(1)
    with pytest.raises(ValueError, match="clip norm"):
        Plan("poisson", math.inf, one * 10, one * 0.1, one, one)
    with pytest.raises(ValueError, match="clip norm"):
        Plan("poisson", 0.0, one * 10, one * 0.1, one, one * 0)
    with pytest.raises(ValueError, match="expected batch"):
        Plan("poisson", 0.1, one * 10, one * 0.1, one * 2, one)  # a divisor that is not q·R


@pytest.mark.parametrize("releases", [1, 2])
def test_a_target_is_kept_by_the_most_exposed_client(releases: int) -> None:
    plan = plan_for(
        [50, 100, 150, 300], releases, batch=15, batch_per_client=True, target_epsilon=2.0
    )
    assert np.unique(plan.multipliers).size == 1
    spent = [server_epsilon(plan.mechanism(i), 2, 3, 1e-5) for i in range(4)]
    assert max(spent) == spent[0] <= 2.0
    assert spent[0] > 1.95
    assert plan.mechanism(0).releases == releases


def test_more_releases_need_more_noise_by_a_root() -> None:
    one, two = (plan_for([100] * 4, r, batch=10, target_epsilon=2.0).multipliers[0] for r in (1, 2))
    assert two / one == pytest.approx(math.sqrt(2), rel=3e-3)


def test_sigma_per_client_reaches_the_same_target_everywhere() -> None:
    plan = plan_for(
        [50, 100, 100, 300],
        batch=15,
        batch_per_client=True,
        target_epsilon=2.0,
        sigma_per_client=True,
    )
    spent = [server_epsilon(plan.mechanism(i), 2, 3, 1e-5) for i in range(4)]
    assert all(1.9 < e <= 2.0 for e in spent)
    assert plan.multipliers[0] > plan.multipliers[1] == plan.multipliers[2] > plan.multipliers[3]
    assert not plan.equal_phi


def test_clients_of_nearly_the_same_rate_share_the_noise_that_the_highest_of_them_needs() -> None:
    sizes = [1010, 1012, 1014, 1016]
    plan = plan_for(
        sizes, batch=15, batch_per_client=True, target_epsilon=2.0, sigma_per_client=True
    )
    spent = [server_epsilon(plan.mechanism(i), 2, 3, 1e-5) for i in range(4)]
    assert max(spent) <= 2.0
    assert np.unique(plan.multipliers).size == 1
    needed = plan_for([1010] * 4, batch=15, target_epsilon=2.0).multipliers[0]
    assert plan.multipliers[0] >= needed * (1 - 1e-3)


def test_noise_at_the_least_level_is_taken_and_less_is_refused() -> None:
    assert plan_for([10] * 4, batch=2, sigma=0.01).multipliers.tolist() == [0.01] * 4
    with pytest.raises(
        DpfedError, match=r"noise multiplier 0\.0099 protects nothing: use at least 0\.01"
    ):
        plan_for([10] * 4, batch=2, sigma=0.0099)


def test_a_plan_is_private_only_if_every_client_adds_noise() -> None:
    four = np.ones(4)
    for noise, private in (([1.0] * 4, True), ([1.0, 1.0, 0.0, 1.0], False), ([0.0] * 4, False)):
        plan = Plan("poisson", 0.1, four * 10, four * 0.1, four, np.array(noise))
        assert plan.private is private


def test_the_protected_unit_is_named() -> None:
    assert plan_for([10] * 4, batch=2).unit == "record"
    assert plan_for([10] * 4, batch=2, unit="patient").unit == "patient"


@pytest.mark.parametrize(
    ("clients", "share", "cohort"),
    [(50, 0.1, 5), (10, 0.001, 1), (10, 1.0, 10), (4, 0.6, 2), (10, 0.29, 3)],
)
def test_the_cohort_is_the_rounded_share_and_at_least_one(
    clients: int, share: float, cohort: int
) -> None:
    schedule = Schedule.of(clients, 1, 1, share)
    assert schedule.cohort == cohort
    assert schedule.participation == cohort / clients


# --- what the oracle does is what the mechanism says ---


class Ones:
    """A stub whose gradients are C/2 in the first coordinate, so the sum counts the batch."""

    has_dropout = False

    def __init__(self, width: int, value: float) -> None:
        self.width, self.value, self.seen = width, value, []

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        self.seen.append(labels.numpy())
        out = torch.zeros(len(labels), self.width)
        out[:, 0] = self.value
        return [out]


def agreement(
    plan: Plan, steps: int = 1, width: int = 100_000
) -> tuple[list[np.ndarray], Tensor, Tensor]:
    """Batches, noised means and Φ of client 0."""
    stub = Ones(width, plan.clip / 2)
    size = int(plan.sizes[0])
    shards = shards_of(np.repeat(np.arange(plan.clients), plan.sizes), plan.clients)
    records = Records({}, torch.arange(int(plan.sizes.sum())))
    oracle = FleetOracle(
        PrivateData(stub, records, shards), RoundTerms(plan, Streams(1), 1, [0], steps)
    )
    out = [oracle(torch.zeros(1, width)) for _ in range(steps)]
    assert all(row.max() < size for row in stub.seen)
    return stub.seen, torch.cat([g for g, _ in out]), out[0][1]


@pytest.mark.parametrize(
    "privacy",
    [
        {"sigma": 1.0},
        {"sigma": 0.7, "clip": 3.0},
        {"target_epsilon": 3.0},
        {"sigma": 1.0, "sampling": "fixed_wor"},
        {"target_epsilon": 3.0, "clip": 2.0, "sampling": "fixed_wor"},
    ],
)
def test_the_noise_that_is_added_is_the_noise_that_is_charged(privacy: dict[str, Any]) -> None:
    plan = plan_for([60] * 4, batch=12, **privacy)
    _, g, phi = agreement(plan)
    noise = g[0, 1:] * 12  # coordinates without signal, back on the scale of the sum
    charged = plan.mechanism(0).noise_multiplier * plan.clip
    assert float(noise.std()) == pytest.approx(charged, rel=0.01)
    assert float(phi) == pytest.approx((charged / 12) ** 2, rel=1e-6)
    if "sigma" in privacy:
        assert charged == pytest.approx(privacy["sigma"] * plan.clip)


def test_fixed_wor_draws_exactly_b_distinct_records_at_every_step() -> None:
    plan = plan_for([60] * 4, batch=12, sampling="fixed_wor")
    batches, _, _ = agreement(plan, steps=40, width=4)
    assert all(len(np.unique(b)) == len(b) == 12 for b in batches)
    assert len({b.tobytes() for b in batches}) == 40


def test_poisson_draws_at_the_rate_that_is_charged() -> None:
    plan = plan_for([60] * 4, batch=12)
    batches, _, _ = agreement(plan, steps=500, width=4)
    total = sum(len(b) for b in batches)
    assert total / 500 / 60 == pytest.approx(
        plan.mechanism(0).rate, abs=5 * math.sqrt(0.2 * 0.8 / 60 / 500)
    )
    assert len({len(b) for b in batches}) > 5

"""Every number has a second source: an exact formula, another accountant or a published table."""

from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as dpa_pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from dpfed.errors import DpfedError
from dpfed.privacy.accounting import pld as pld_module
from dpfed.privacy.accounting.loss_distribution import (
    Term,
    _one_step,
    canonical,
    compose,
    interval_for,
    terms_of,
)
from dpfed.privacy.accounting.pld import (
    AccountingError,
    delta_at,
    delta_curve,
    epsilon,
    membership_advantage,
    pld_epsilon,
    replace_one_epsilon,
    tuning_epsilon,
)
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.mechanism import Mechanism, Sampling

CIFAR = Mechanism("poisson", 0.016, 1.0)


def poisson(
    rate: float, steps: int, sigma: float = 1.0, **kind: int
) -> list[tuple[Mechanism, int]]:
    return [(Mechanism("poisson", rate, sigma, **kind), steps)]


def gaussian_delta(at: float, mu: float) -> float:
    """Balle and Wang 2018: unsampled steps are one Gaussian with shift mu = sqrt(steps)/sigma."""
    upper = math.exp(special.log_ndtr(mu / 2 - at / mu))
    return upper - math.exp(at + special.log_ndtr(-mu / 2 - at / mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    def gap(at: float) -> float:
        found = gaussian_delta(at, mu)
        return math.log(found / delta) if found > 0 else -99.0

    return float(optimize.brentq(gap, 0, 2000, xtol=1e-12))


# --- full batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"),
    [
        (1, 1, 1e-5),
        (20, 100, 1e-5),
        (45, 2000, 1e-10),
        (3, 500, 1e-8),
        (1, 200, 1e-6),
        (1000, 10**6, 1e-5),
    ],
)
def test_full_batches_equal_the_analytic_gaussian_and_never_fall_below(
    sigma: float, steps: int, delta: float
) -> None:
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
    found = pld_epsilon(poisson(1.0, steps, sigma), delta)
    assert exact <= found <= exact * 1.002


@pytest.mark.parametrize(("sigma", "steps"), [(2.0, 1), (30.0, 400)])
def test_delta_curve_and_membership_advantage_equal_the_analytic_gaussian(
    sigma: float, steps: int
) -> None:
    mu = math.sqrt(steps) / sigma
    points = [0.0, 0.1, 0.5, 1.0, 2.0]
    found = delta_curve(poisson(1.0, steps, sigma), points)
    for at, value in zip(points, found, strict=True):
        assert gaussian_delta(at, mu) <= value <= gaussian_delta(at, mu) * 1.002 + 1e-12
    assert membership_advantage(poisson(1.0, steps, sigma)) == found[0]
    assert found[0] == pytest.approx(2 * special.ndtr(mu / 2) - 1, rel=2e-3)


# --- published figures --------------------------------------------------------------------------

SERVER = [
    (0.016, 2000, 1e-5, 4.363, 4.794),
    (0.032, 2000, 1e-5, 9.667, 10.518),
    (0.008, 2000, 1e-6, 2.325, 2.590),
    (0.05, 15000, 1e-5, 63.14, 73.17),
    (16 / 16837, 2000, 1e-5, 0.1973, 0.687),
    (16 / 26185, 2000, 1e-5, 0.1214, 0.62),
    (16 / 98175, 2000, 1e-6, 0.0355, 0.63),
    (16 / 90961, 2000, 1e-6, 0.0385, 0.63),
    (16 / 64, 2000, 1e-5, 139, None),
    (16 / 250, 2000, 1e-5, 22.4, None),
    (16 / 2000, 2000, 1e-5, 2.02, None),
]


@pytest.mark.parametrize(("rate", "steps", "delta", "pld", "rdp"), SERVER)
def test_published_figures_and_rdp_is_never_smaller(
    rate: float, steps: int, delta: float, pld: float, rdp: float | None
) -> None:
    found = epsilon(poisson(rate, steps), delta)
    assert found == pytest.approx(pld, rel=0.01)
    assert rdp_epsilon(poisson(rate, steps), delta) >= found
    if rdp is not None:
        assert rdp_epsilon(poisson(rate, steps), delta) == pytest.approx(rdp, rel=0.01)


def test_other_published_figures() -> None:
    assert epsilon(poisson(0.016, 18 * 20), 1e-5) == pytest.approx(1.885, rel=0.01)
    assert replace_one_epsilon(poisson(0.016, 2000), 1e-5) == pytest.approx(7.22, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "steps", "delta"), [(0.016, 2000, 1e-5), (16 / 98175, 2000, 1e-6), (0.3, 3, 1e-5)]
)
def test_halving_the_grid_moves_epsilon_by_less_than_half_a_percent(
    rate: float, steps: int, delta: float
) -> None:
    found = pld_epsilon(poisson(rate, steps), delta)
    terms = terms_of(poisson(rate, steps))
    assert interval_for(found, terms) <= min(1e-4, found / 2000)
    finer = compose.__wrapped__(terms, interval_for(found, terms) / 2).get_epsilon_for_delta(delta)
    assert finer * (1 - 1e-6) <= found <= finer * 1.005


@pytest.mark.parametrize(
    ("rate", "sigma", "interval"), [(0.016, 1.0, 1e-3), (0.9, 0.3, 1e-3), (1e-3, 20.0, 1e-5)]
)
def test_one_step_is_dp_accountings(rate: float, sigma: float, interval: float) -> None:
    ours = _one_step(rate, sigma, interval, -50.0)
    theirs = dpa_pld.from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=rate
    )
    for name in ("_pmf_remove", "_pmf_add"):
        one, other = getattr(ours, name).to_dense_pmf(), getattr(theirs, name).to_dense_pmf()
        assert one._lower_loss == other._lower_loss
        np.testing.assert_allclose(one._probs, other._probs, atol=1e-10)
        assert one._probs.sum() + one._infinity_mass == pytest.approx(1, abs=1e-12)


def test_memory_stays_bounded_when_there_is_hardly_any_noise() -> None:
    found = pld_epsilon(poisson(0.1, 200, 0.1), 1e-5)
    assert 100 < found < rdp_epsilon(poisson(0.1, 200, 0.1), 1e-5)
    assert compose(terms_of(poisson(0.1, 200, 0.1)), interval_for(found))._pmf_remove.size < 2e7


# --- order relations ----------------------------------------------------------------------------

PLANS = {"rate": st.floats(0.002, 0.5), "steps": st.integers(1, 150), "sigma": st.floats(0.7, 6)}


@settings(max_examples=4, deadline=None, derandomize=True)
@given(**PLANS, delta=st.sampled_from([1e-4, 1e-6]))
def test_epsilon_rises_with_rate_and_steps_and_falls_with_sigma_and_delta(
    rate: float, steps: int, sigma: float, delta: float
) -> None:
    here = epsilon(poisson(rate, steps, sigma), delta)  # raises if RDP were smaller
    assert here <= pld_epsilon(poisson(min(1.0, rate * 1.2), steps, sigma), delta)
    assert here <= pld_epsilon(poisson(rate, steps + 1 + steps // 5, sigma), delta)
    assert here >= pld_epsilon(poisson(rate, steps, sigma * 1.2), delta)
    assert here >= pld_epsilon(poisson(rate, steps, sigma), delta * 3)


def test_an_rdp_figure_below_pld_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pld_module, "rdp_epsilon", lambda history, delta: 1.0)
    with pytest.raises(AccountingError, match="exceeds"):
        epsilon(poisson(0.016, 2000), 1e-5)


# --- what a step releases together --------------------------------------------------------------


def test_two_releases_of_one_batch_are_one_at_sigma_over_root_two() -> None:
    sam = epsilon(poisson(0.016, 2000, math.sqrt(2), releases=2), 1e-5)
    assert sam == pytest.approx(epsilon(poisson(0.016, 2000), 1e-5), rel=1e-9)
    plain = pld_epsilon(poisson(0.016, 2000, 1.0, releases=2), 1e-5)
    assert plain / 4.363 == pytest.approx(2.26, rel=0.01)
    assert pld_epsilon(poisson(0.016, 2000, 1.0, batches=2), 1e-5) == pld_epsilon(
        poisson(0.016, 4000), 1e-5
    )


def test_changing_rates_and_noise_compose_as_dp_accounting_composes_them() -> None:
    history = [
        (Mechanism("poisson", 0.02, 1.0), 300),
        (Mechanism("poisson", 0.05, 1.5, releases=2), 100),
        (Mechanism("poisson", 0.02, 1.0), 200),
    ]
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for rate, sigma, count in [(0.02, 1.0, 500), (0.05, 1.5 / math.sqrt(2), 100)]:
        accountant.compose(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(sigma)), count)
    assert pld_epsilon(history, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-5)
    assert terms_of(history) == terms_of(history[::-1])
    assert len(terms_of(history)) == 2
    assert epsilon(history, 1e-5) > max(pld_epsilon([part], 1e-5) for part in history)


# --- fixed-size batches -------------------------------------------------------------------------


def theorem_9(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """Wang, Balle and Kasiviswanathan 2019, Theorem 9 at integer orders, from the paper."""
    best = math.inf
    for order in range(2, 257):
        rho = [j / (2 * multiplier**2) for j in range(order + 1)]
        logs = [0.0]
        pair = min(math.log(4) + rho[2] + math.log1p(-math.exp(-rho[2])), math.log(2) + rho[2])
        logs.append(2 * math.log(rate) + math.log(math.comb(order, 2)) + pair)
        for j in range(3, order + 1):
            logs.append(
                math.log(2) + j * math.log(rate) + math.log(math.comb(order, j)) + (j - 1) * rho[j]
            )
        curve = steps * float(special.logsumexp(logs)) / (order - 1)
        best = min(best, curve + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return best


@pytest.mark.parametrize(("sigma", "expected"), [(1.0, 65.27), (2.0, 9.10)])
def test_fixed_size_batches_by_theorem_9_with_sensitivity_2c(sigma: float, expected: float) -> None:
    found = epsilon([(Mechanism("fixed_wor", 0.016, sigma), 2000)], 1e-5)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found == pytest.approx(theorem_9(0.016, sigma / 2, 2000, 1e-5), rel=1e-2)
    assert replace_one_epsilon([(Mechanism("fixed_wor", 0.016, sigma), 2000)], 1e-5) == found
    assert 0 < delta_at([(Mechanism("fixed_wor", 0.016, sigma), 2000)], found) <= 1.001e-5


# --- edges and labels ---------------------------------------------------------------------------


def test_nothing_released_costs_nothing_and_no_noise_costs_everything() -> None:
    assert pld_epsilon([], 1e-5) == rdp_epsilon([], 1e-5) == epsilon([(CIFAR, 0)], 1e-5) == 0
    assert delta_at([], 0.0) == tuning_epsilon([], 1e-5, 7) == 0
    bare = poisson(0.016, 1, 0.0)
    assert pld_epsilon(bare, 1e-5) == rdp_epsilon(bare, 1e-5) == epsilon(bare, 1e-5) == math.inf
    assert pld_epsilon([*bare, (CIFAR, 5)], 1e-5) == math.inf
    assert membership_advantage(bare) == 1
    assert pld_epsilon(poisson(1e-5, 2, 5.0), 1e-3) == 0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, 1e-14])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    for figure in (pld_epsilon, rdp_epsilon, epsilon, replace_one_epsilon):
        with pytest.raises(DpfedError, match="delta"):
            figure([(CIFAR, 1)], delta)


def test_mixed_adjacencies_and_impossible_histories_are_refused() -> None:
    fixed = Mechanism("fixed_wor", 0.016, 1.0)
    for figure in (pld_epsilon, rdp_epsilon, epsilon, replace_one_epsilon):
        with pytest.raises(DpfedError, match="mixes"):
            figure([(CIFAR, 1), (fixed, 1)], 1e-5)
    with pytest.raises(DpfedError, match="Poisson sampling only"):
        pld_epsilon([(fixed, 1)], 1e-5)
    with pytest.raises(DpfedError, match="-1 steps"):
        pld_epsilon([(CIFAR, -1)], 1e-5)
    with pytest.raises(DpfedError, match="0 or more"):
        delta_at([(CIFAR, 1)], -0.5)


def test_delta_at_the_reported_epsilon_is_delta() -> None:
    for rate, delta in [(0.016, 1e-5), (16 / 98175, 1e-6)]:
        history = poisson(rate, 2000)
        assert delta_at(history, pld_epsilon(history, delta)) == pytest.approx(delta, rel=0.01)


def test_tuning_costs() -> None:
    history = poisson(0.016, 200)
    assert tuning_epsilon(history, 1e-5, 1) == epsilon(history, 1e-5)
    assert tuning_epsilon(history, 1e-5, 10) == pld_epsilon(poisson(0.016, 2000), 1e-5)
    with pytest.raises(DpfedError, match="at least 1"):
        tuning_epsilon(history, 1e-5, 0)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_wor"])
def test_a_step_of_two_batches_costs_what_two_steps_cost(sampling: Sampling) -> None:
    """In every figure: the reported one, its check, the whole curve and the cost of tuning."""
    twice, two_steps = (
        [(Mechanism(sampling, 0.1, 2.0, batches=2), 5)],
        [(Mechanism(sampling, 0.1, 2.0), 10)],
    )
    assert epsilon(twice, 1e-5) == epsilon(two_steps, 1e-5)
    assert rdp_epsilon(twice, 1e-5) == pytest.approx(rdp_epsilon(two_steps, 1e-5), rel=1e-12)
    assert delta_at(twice, 0.5) == pytest.approx(delta_at(two_steps, 0.5), rel=1e-12)
    assert tuning_epsilon(twice, 1e-5, 3) == tuning_epsilon(two_steps, 1e-5, 3)


def test_equal_terms_are_joined() -> None:
    terms = [
        Term(0.1, 1.0, 3),
        Term(0.1, 1.0, 2, 1.0, 4),
        Term(0.1, 1.0, 5, 0.5, 2),
        Term(0.1, 1.0, 5, 0.0, 9),
    ]
    assert canonical(terms) == (Term(0.1, 1.0, 5, 0.5, 2), Term(0.1, 1.0, 11, 1.0, 1))

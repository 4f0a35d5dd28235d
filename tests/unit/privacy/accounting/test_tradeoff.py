"""Trade-off curves and mu against exact Gaussians and brute force; they are never optimistic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpfed.privacy.accounting.tradeoff import (
    CUTOFF,
    Profile,
    attack_rates,
    gaussian_false_negatives,
    gaussian_mu,
    largest_mu,
    profile_of,
    true_positive_rates,
    undominated,
)
from dpfed.privacy.mechanism import Mechanism

RATES = [0.001, 0.01, 0.1, 0.3]


def gaussian_delta(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """Return delta(epsilon) of the Gaussian mechanism, by Balle and Wang 2018."""
    below = norm.cdf(mu / 2 - epsilons / mu)
    above = np.exp(epsilons) * norm.cdf(-mu / 2 - epsilons / mu)
    return np.asarray(below - above)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (5.0, 9), (4.0, 100)])
def test_a_pure_gaussian_has_its_exact_mu_and_attack_rates(sigma: float, steps: int) -> None:
    history = [(Mechanism("poisson", 1.0, sigma), steps)]
    mu = math.sqrt(steps) / sigma
    profile = profile_of(history)
    found = gaussian_mu(profile)
    assert found is not None
    assert mu <= found <= mu * 1.0001
    # By hand: TPR = Phi(Phi^-1(FPR) + mu), such as 0.0183 at FPR 0.001 and mu 1.
    exact = norm.cdf(norm.ppf(RATES) + mu)
    rates = true_positive_rates(profile, RATES)
    assert np.all(rates >= exact)
    assert rates == pytest.approx(exact, rel=1e-3)


def test_known_attack_rates_of_mu_1() -> None:
    rates = attack_rates([[(Mechanism("poisson", 1.0, 1.0), 1)]], [0.001, 0.01, 0.1])
    assert rates == pytest.approx([0.01829, 0.09236, 0.38914], abs=1e-5)


def _likelihoods(rate: float, sigma: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of fine cells without and with the record, in order of their ratio."""
    edges = np.linspace(-9 * sigma, 1 + 9 * sigma, {1: 200_001, 2: 2_001}[steps])
    absent = np.diff(norm.cdf(edges / sigma))
    present = (1 - rate) * absent + rate * np.diff(norm.cdf((edges - 1) / sigma))
    without, with_record = absent, present
    for _ in range(steps - 1):
        without = np.multiply.outer(without, absent).ravel()
        with_record = np.multiply.outer(with_record, present).ravel()
    order = np.argsort(-with_record / np.maximum(without, 1e-300))
    return without[order], with_record[order]


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.3, 1.0, 1), (0.05, 0.6, 1), (0.2, 0.8, 2)])
def test_the_subsampled_gaussian_is_bounded_closely(rate: float, sigma: float, steps: int) -> None:
    """The best tests by likelihood ratio are computed cell by cell, in both directions."""
    without, with_record = _likelihoods(rate, sigma, steps)
    # Accuse the cells with the largest ratio first; or clear those with the smallest ratio first.
    accuse = np.interp(RATES, without.cumsum(), with_record.cumsum())
    clear = np.interp(RATES, with_record[::-1].cumsum(), without[::-1].cumsum())
    rates = true_positive_rates(profile_of([(Mechanism("poisson", rate, sigma), steps)]), RATES)
    brute = np.maximum(accuse, clear)
    assert np.all(rates >= brute), "an optimistic curve"
    # The curve bounds both directions at once by a convex function, so it may lie a little above.
    assert np.all(rates <= 1.15 * brute)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps"), [(0.3, 1.0, 1), (0.016, 1.0, 2000), (0.05, 0.7, 40)]
)
def test_mu_covers_the_curve_between_all_nodes(rate: float, sigma: float, steps: int) -> None:
    profile = profile_of([(Mechanism("poisson", rate, sigma), steps)])
    mu = gaussian_mu(profile)
    assert mu is not None
    inner = np.linspace(0, profile.epsilons[-1], 20_011)
    deltas = np.interp(np.exp(inner), np.exp(profile.epsilons), profile.deltas)
    counted = deltas >= CUTOFF
    assert np.all(gaussian_delta(mu, inner[counted]) >= deltas[counted] * (1 - 1e-9))
    assert np.any(gaussian_delta(0.999 * mu, inner[counted]) < deltas[counted]), "not the smallest"


def test_steps_on_a_curve_between_two_nodes_count() -> None:
    """The profile of two nodes is a chord; the Gaussian through both nodes lies below it."""
    nodes = np.array([0.0, 2.0])
    exact = Profile(nodes, np.minimum(1.0, gaussian_delta(1.0, nodes)), exact=True)
    mu = gaussian_mu(Profile(np.append(nodes, 9.0), np.append(exact.deltas, 0.0), exact=True))
    assert mu is not None
    assert mu > 1.1


def test_the_largest_of_several_histories_counts() -> None:
    weak = [(Mechanism("poisson", 1.0, 2.0), 1)]
    strong = [(Mechanism("poisson", 1.0, 0.5), 1)]
    assert largest_mu([weak, strong]) == pytest.approx(2.0, rel=1e-4)
    assert attack_rates([weak, strong], [0.01]) == attack_rates([strong], [0.01])


def test_only_histories_that_may_be_the_worst_are_composed() -> None:
    def history(rate: float, sigma: float, steps: int = 3) -> list[tuple[Mechanism, int]]:
        return [(Mechanism("poisson", rate, sigma), steps)]

    worst = history(0.2, 1.0)
    incomparable = history(0.3, 1.2)
    more_steps = history(0.1, 1.0, 4)
    others = [history(0.1, 1.0), history(0.2, 1.1), worst]
    kept = undominated([worst, incomparable, more_steps, *others])
    assert kept == [tuple(worst), tuple(incomparable), tuple(more_steps)]
    two_releases = [(Mechanism("poisson", 0.1, 2.0, releases=2), 3)]
    assert undominated([worst, two_releases]) == [tuple(worst), tuple(two_releases)]


def test_a_history_without_steps_leaks_nothing() -> None:
    profile = profile_of([])
    assert gaussian_mu(profile) == 0.0
    assert true_positive_rates(profile, [0.0, 0.01, 1.0]).tolist() == [0.0, 0.01, 1.0]


def test_no_noise_leaks_everything() -> None:
    profile = profile_of([(Mechanism("poisson", 0.1, 0.0), 3)])
    assert gaussian_mu(profile) == math.inf
    assert true_positive_rates(profile, [0.001]).tolist() == [1.0]


def test_renyi_bounds_give_attack_rates_but_no_mu() -> None:
    history = [(Mechanism("fixed_wor", 0.1, 2.0), 10)]
    assert largest_mu([history]) is None
    poisson = attack_rates([[(Mechanism("poisson", 0.1, 2.0), 10)]], [0.01])
    assert attack_rates([history], [0.01])[0] > poisson[0]


def test_errors_of_the_gaussian() -> None:
    rates = np.array([0.5, norm.cdf(-1.0)])
    # By hand: 1 - Phi(0 + 1) and 1 - Phi(-1 + 1).
    assert gaussian_false_negatives(1.0, rates) == pytest.approx([0.158655, 0.5], abs=1e-6)

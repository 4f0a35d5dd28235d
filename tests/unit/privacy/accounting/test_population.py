"""Bounds for many clients: never below the truth, at most 3 % above it, the largest exact."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import pld_epsilon
from dpfed.privacy.accounting.population import Population, largest_epsilon, population_epsilon
from dpfed.privacy.mechanism import Mechanism


def clients(
    rates: npt.ArrayLike, rounds: npt.ArrayLike, steps: int, sigma: npt.ArrayLike
) -> Population:
    size = np.shape(rates)
    return Population(
        np.asarray(rates, dtype=float),
        np.broadcast_to(np.asarray(sigma, dtype=float), size),
        np.broadcast_to(rounds, size),
        steps,
    )


def exact(rate: float, rounds: int, sigma: float, steps: int = 20, releases: int = 1) -> float:
    return pld_epsilon(
        [(Mechanism("poisson", rate, sigma, releases=releases), steps * int(rounds))], 1e-5
    )


def test_unequal_clients_are_bounded_within_three_percent_and_the_largest_is_exact() -> None:
    rng = np.random.default_rng(3)
    rates = 16 / np.exp(rng.uniform(np.log(100), np.log(200), 20_000))
    rounds = rng.binomial(1000, 0.0004, len(rates))
    found = population_epsilon(clients(rates, rounds, 20, 1.0), 1e-5)
    assert np.all(found[rounds == 0] == 0)
    sample = rng.choice(np.flatnonzero(rounds), 12, replace=False)
    truth = np.array([exact(rates[i], rounds[i], 1.0) for i in sample])
    assert np.all(found[sample] >= truth)
    assert np.all(found[sample] <= 1.03 * truth)
    worst = int(np.argmax(found))
    assert found[worst] == exact(rates[worst], rounds[worst], 1.0)
    assert found[worst] == largest_epsilon(clients(rates, rounds, 20, 1.0), 1e-5)


def test_many_rounds_share_cells() -> None:
    rounds = np.arange(60, 180)
    kinds = [Mechanism("poisson", 0.02, 1.2, releases=2)] * len(rounds)
    found = population_epsilon(Population.of(kinds, rounds, 5), 1e-5)
    assert np.all(np.diff(found) >= -1e-9)
    assert len(np.unique(found)) < 90
    for i in (0, 61, 119):
        truth = exact(0.02, rounds[i], 1.2, 5, releases=2)
        assert truth <= found[i] <= 1.03 * truth


def test_a_sigma_for_each_client() -> None:
    rates = np.array([0.1, 0.1, 0.05, 0.051])
    sigmas = np.array([1.5, 0.8, 1.0, 1.003])
    rounds = np.array([3, 3, 5, 5])
    found = population_epsilon(clients(rates, rounds, 20, sigmas), 1e-5)
    for i in range(4):
        truth = exact(rates[i], rounds[i], sigmas[i])
        assert truth <= found[i] <= 1.03 * truth
    assert (
        found.max()
        == largest_epsilon(clients(rates, rounds, 20, sigmas), 1e-5)
        == exact(0.1, 3, 0.8)
    )


def test_the_grid_is_refined_where_epsilon_is_steep() -> None:
    """At so little noise 2 % of sigma are 8 % of epsilon, so an even grid would be too coarse."""
    sigmas = np.array([0.4, 0.408])
    found = population_epsilon(clients([0.1, 0.1], [1, 1], 5, sigmas), 1e-5)
    for i in range(2):
        truth = exact(0.1, 1, sigmas[i], 5)
        assert truth <= found[i] <= 1.03 * truth


def test_no_rounds_and_no_noise() -> None:
    found = population_epsilon(clients([0.1] * 3, [0, 2, 0], 20, [1.0, 0.0, 0.0]), 1e-5)
    assert found.tolist() == [0, math.inf, 0]
    assert population_epsilon(clients([0.1], [5], 0, 1.0), 1e-5).tolist() == [0]
    assert largest_epsilon(clients([0.1, 0.2], [0, 0], 20, 1.0), 1e-5) == 0


@pytest.mark.parametrize(
    ("rates", "rounds", "sigma", "delta", "word"),
    [
        ([1.1], [1], 1.0, 1e-5, "rate"),
        ([0.0], [1], 1.0, 1e-5, "rate"),
        ([0.1], [-1], 1.0, 1e-5, "rounds"),
        ([0.1], [1], -1.0, 1e-5, "noise"),
        ([0.1], [1], 1.0, 1.0, "delta"),
    ],
)
def test_bad_values_are_refused(
    rates: list[float], rounds: list[int], sigma: float, delta: float, word: str
) -> None:
    with pytest.raises(DpfedError, match=word):
        population_epsilon(clients(rates, rounds, 20, sigma), delta)

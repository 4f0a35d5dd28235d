"""SPEC 6.2, the table of 6.4, and tests A7 and A9."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.accounting.observers import (
    Rounds,
    expected_rounds,
    participation_probability,
    server_epsilon,
    third_party_epsilon,
    view_epsilon,
)
from dpfed.privacy.accounting.pld import delta_at, pld_epsilon
from dpfed.privacy.mechanism import Mechanism

CIFAR = Mechanism("poisson", 0.016, 1.0)


def third_party(step: Mechanism, local_steps: int, rounds: int, probability: float) -> float:
    return third_party_epsilon([Rounds(step, local_steps, rounds, probability)], 1e-5)


def planned(
    step: Mechanism, local_steps: int, rounds: int, participation: float, delta: float
) -> Planned:
    return Planned((step,), local_steps, participation, ((participation, rounds),), delta)


TABLE = [
    (0.016, 20, 100, 0.1, 1e-5, (4.363, 1.476, 1.563, 4.794)),
    (0.032, 20, 100, 0.1, 1e-5, (9.667, 2.998, 3.246, 10.518)),
    (0.008, 20, 100, 0.1, 1e-6, (2.325, 0.930, 0.961, 2.590)),
    (0.05, 50, 300, 0.2, 1e-5, (63.14, 21.18, 22.24, 73.17)),
    (16 / 16837, 20, 100, 1.0, 1e-5, (0.1973, 0.1973, 0.1973, 0.687)),
]


@pytest.mark.parametrize(("rate", "steps", "rounds", "part", "delta", "expected"), TABLE)
def test_rows_of_spec_6_4(
    rate: float, steps: int, rounds: int, part: float, delta: float, expected: tuple[float, ...]
) -> None:
    found = planned(Mechanism("poisson", rate, 1.0), steps, rounds, part, delta)
    figures = (found.server_worst, found.server_expected, found.third_party, found.rdp_server_worst)
    assert figures == pytest.approx(expected, rel=0.01)
    for word in ("PLD", "add/remove one", "poisson", f"{delta:g}"):
        assert word in found.assumptions()


def test_third_party_is_the_sum_of_spec_6_2_b() -> None:
    at = third_party(CIFAR, 5, 12, 0.3)
    total = sum(stats.binom.pmf(n, 12, 0.3) * delta_at([(CIFAR, 5 * n)], at) for n in range(1, 13))
    assert total == pytest.approx(1e-5, rel=2e-3)


def test_third_party_with_changing_probabilities_is_poisson_binomial() -> None:
    chances = [0.2, 0.2, 0.5, 0.9]
    at = third_party_epsilon([Rounds(CIFAR, 40, 1, p) for p in chances], 1e-5)
    law = [1.0]
    for p in chances:
        law = [(1 - p) * a + p * b for a, b in zip([*law, 0.0], [0.0, *law], strict=True)]
    total = sum(w * delta_at([(CIFAR, 40 * n)], at) for n, w in enumerate(law))
    assert total == pytest.approx(1e-5, rel=2e-3)


def test_third_party_lies_between_no_round_and_all_rounds() -> None:
    """A7."""
    server = server_epsilon(CIFAR, 5, 10, 1e-5)
    figures = [third_party(CIFAR, 5, 10, p) for p in (0.0, 0.05, 0.3, 0.9, 1.0)]
    assert figures == sorted(figures)
    assert figures[0] == 0
    assert figures[-1] == server
    assert figures[-2] < server


def test_colluding_clients_raise_the_probability() -> None:
    assert third_party(CIFAR, 20, 100, participation_probability(5, 50, 1)) == pytest.approx(
        1.575, rel=0.01
    )
    assert participation_probability(5, 50, 49) == 1.0
    assert participation_probability(4, 4) == 1.0


def test_shared_batches_count_in_every_view() -> None:
    twice = Mechanism("poisson", 0.016, math.sqrt(2), releases=2)
    assert third_party(twice, 5, 10, 0.3) == pytest.approx(third_party(CIFAR, 5, 10, 0.3), rel=1e-6)
    pair = Mechanism("poisson", 0.016, 1.0, batches=2)
    assert third_party(pair, 5, 10, 0.3) == third_party(CIFAR, 10, 10, 0.3)


def test_fixed_size_views_are_ordered() -> None:
    found = planned(Mechanism("fixed_wor", 0.016, 2.0), 20, 100, 0.1, 1e-5)
    assert found.server_worst == found.rdp_server_worst == pytest.approx(9.10, rel=1e-3)
    assert found.server_expected < found.third_party < found.server_worst
    assert "RDP" in found.assumptions()
    assert "replace one" in found.assumptions()
    assert third_party(Mechanism("fixed_wor", 0.016, 2.0), 20, 100, 1.0) == pytest.approx(
        found.server_worst, rel=1e-9
    )


def test_expected_rounds_are_rounded_up() -> None:
    assert [expected_rounds(100, p) for p in (0.1, 0.101, 1.0)] == [10, 11, 100]
    assert view_epsilon("server_expected", Rounds(CIFAR, 5, 10, 0.31), 1e-5) == server_epsilon(
        CIFAR, 5, 4, 1e-5
    )


def test_the_run_is_as_bad_as_its_worst_client() -> None:
    """A9."""
    sizes = [1600, 800, 400, 160]
    histories = [[(Mechanism("poisson", 16 / size, 1.0), 40)] for size in sizes]
    each = [pld_epsilon(history, 1e-5) for history in histories]
    kinds = tuple(history[0][0] for history in histories)
    worst = Planned(kinds, 20, 1.0, ((1.0, 2),), 1e-5).server_worst
    assert worst == max(each) == each[-1]
    assert worst > 1.5 * sum(each) / len(each)
    average = Mechanism("poisson", 16 / (sum(sizes) / len(sizes)), 1.0)
    assert worst > 2 * pld_epsilon([(average, 40)], 1e-5)


def test_bad_plans_are_refused_in_one_sentence() -> None:
    with pytest.raises(DpfedError, match="probability"):
        third_party(CIFAR, 5, 10, 1.5)
    with pytest.raises(DpfedError, match="cannot be accounted"):
        Rounds(CIFAR, 5, -10, 0.5)
    with pytest.raises(DpfedError, match="delta"):
        third_party_epsilon([Rounds(CIFAR, 5, 10, 0.5)], 1.0)
    with pytest.raises(DpfedError, match="cohort of 9"):
        participation_probability(9, 4)
    with pytest.raises(DpfedError, match="collude"):
        participation_probability(2, 4, 4)
    with pytest.raises(DpfedError, match="mixes"):
        third_party_epsilon([Rounds(CIFAR, 1), Rounds(Mechanism("fixed_wor", 0.1, 1.0), 1)], 1e-5)

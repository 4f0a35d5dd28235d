"""Figures of a plan whose clients differ hold for every one of them, at every delta."""

from __future__ import annotations

import pytest

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import (
    Planned,
    assumptions,
    delta_warning,
    refuse_large_delta,
)
from dpfed.privacy.accounting.pld import delta_at, epsilon
from dpfed.privacy.mechanism import Mechanism

# Both cost about 4 at delta 1e-5 over 200 steps, the first a little more.
# At a smaller delta the second costs far more.
KINDS = (
    Mechanism("poisson", 0.5, 7.7220742643420905),
    Mechanism("poisson", 0.01, 0.6219306499559979),
)
PLANNED = Planned(KINDS, 10, 1.0, ((1.0, 20),), 1e-5)


def test_the_case_is_one() -> None:
    first, second = ([epsilon([(kind, 200)], delta) for kind in KINDS] for delta in (1e-5, 1e-6))
    assert first[0] > first[1]
    assert second[0] + 0.4 < second[1]


@pytest.mark.parametrize("delta", [1e-5, 1e-6])
def test_the_bound_costs_as_much_as_any_client_at_any_delta(delta: float) -> None:
    bound = epsilon(PLANNED.bound, delta)
    assert all(bound >= epsilon([(kind, 200)], delta) for kind in KINDS)


def test_the_bound_of_equal_clients_is_their_history() -> None:
    before = ((Mechanism("poisson", 0.1, 2.0), 7),)
    alone = Planned(KINDS[:1], 10, 1.0, ((1.0, 20),), 1e-5, prior=before)
    assert alone.bound == [*before, (KINDS[0], 200)]


def test_the_curve_holds_for_every_client() -> None:
    for at, stated in PLANNED.curve([1.0, 8.0]):
        assert stated == max(delta_at([(kind, 200)], at) for kind in KINDS)


def test_an_uncounted_start_is_said_beside_every_epsilon() -> None:
    plain, open_ended = (
        assumptions(KINDS, 1e-5, "record", uncounted=flag) for flag in (False, True)
    )
    assert (
        "epsilon holds only if what training started from was not trained on these clients' records"
        in open_ended
    )
    assert plain in open_ended
    assert "holds only if" not in plain


@pytest.mark.parametrize(
    ("delta", "records", "warned", "refused"),
    [
        (1e-5, 1000, False, False),
        (9.9e-5, 1000, False, False),
        (1e-4, 1000, True, False),
        (9.9e-4, 1000, True, False),
        (1e-3, 1000, True, True),
        (0.5, 200, True, True),
        (1e-5, 9_999, False, False),
        (1e-5, 10_000, True, False),
        (1e-5, 100_000, True, True),
        (0.05, 1, False, False),
        (0.1, 1, True, False),
    ],
)
def test_delta_is_compared_with_the_largest_client(
    delta: float, records: int, warned: bool, refused: bool
) -> None:
    sentence = delta_warning(delta, records)
    assert (sentence is not None) is warned
    assert (
        Planned(KINDS, 1, 1.0, ((1.0, 1),), delta, largest=records).warnings == [sentence] * warned
    )
    refuse_large_delta(delta, records, "record", allowed=True)
    if not refused:
        refuse_large_delta(delta, records, "record", allowed=False)
        return
    with pytest.raises(DpfedError, match=r"privacy\.allow_large_delta = true"):
        refuse_large_delta(delta, records, "record", allowed=False)


@pytest.mark.parametrize("records", [1, 7, 143, 1000, 98_175])
def test_the_delta_that_is_advised_is_accepted(records: int) -> None:
    sentence = delta_warning(0.9, records, "patient")
    assert sentence is not None
    advised = float(sentence.split(" use ")[1].split()[0])
    assert delta_warning(advised, records) is None
    assert f"{records} patient" in sentence

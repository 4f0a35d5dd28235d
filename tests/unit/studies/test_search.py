"""The search: examples by hand, and properties of every search (equal effort, an end, ...)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfed.studies.search import (
    Point,
    Score,
    Space,
    at_edges,
    best,
    decision,
    initial,
    lost,
    mean,
    next_points,
    propose,
    ratio,
)


def search(
    spaces: list[Space], score: Callable[[int, Point], float], extra: int = 2, limit: int = 5
) -> tuple[list[dict[Point, Score]], list[list[Point]]]:
    """Run a search to its end; return the scores, and the points of each arm in their order."""
    scored: list[dict[Point, Score]] = [{} for _ in spaces]
    order: list[list[Point]] = [[] for _ in spaces]
    for _ in range(1000):
        todo = next_points(spaces, scored, extra, limit)
        if not any(todo):
            return scored, order
        for i, points in enumerate(todo):
            for point in points:
                assert point not in scored[i], "a point is never run twice"
                scored[i][point] = Score(score(i, point))
                order[i].append(point)
    raise AssertionError("the search does not end")


def hill(top: float) -> Callable[[int, Point], float]:
    return lambda i, point: -abs(math.log(point[0] / top))


def test_an_interior_best_is_refined_towards_its_better_neighbour() -> None:
    scored, order = search([((0.01, 0.1, 1.0, 10.0),)], hill(0.2))
    # After the grid the best is 0.1, with 1.0 as its better neighbour: sqrt(0.1) = 0.316.
    # Then sqrt(0.1 * 0.316) = 0.178.
    assert order[0] == [(0.01,), (0.1,), (1.0,), (10.0,), (0.316,), (0.178,)]
    assert best(scored[0]) == (0.178,)
    assert at_edges(scored[0]) == [False]


def test_a_best_at_the_edge_widens_by_the_grids_ratio() -> None:
    _, order = search([((0.01, 0.1, 1.0, 10.0),)], hill(1e6))
    assert order[0][4:] == [(100.0,), (1e3,), (1e4,), (1e5,), (1e6,)], (
        "five stages, still at the edge"
    )
    _, order = search([((0.01, 0.1, 1.0, 10.0),)], hill(2e-4))
    assert order[0][4:] == [(1e-3,), (1e-4,), (1e-5,)], "below; the third stage brackets it"


def test_one_arm_at_an_edge_gives_every_arm_another_stage() -> None:
    space: Space = ((0.01, 0.1, 1.0, 10.0),)
    tops = (2e3, 0.3)
    scored, _ = search([space, space], lambda i, p: -abs(math.log(p[0] / tops[i])))
    # Four, then 100, 1000 and 1e4, which brackets 1000.
    assert [len(s) for s in scored] == [7, 7]


def test_ties_go_to_the_smaller_rate_but_a_tie_at_the_edge_is_an_edge() -> None:
    flat = {(0.1,): Score(0.5), (1.0,): Score(0.9), (10.0,): Score(0.9)}
    assert best(flat) == (1.0,)
    assert at_edges(flat) == [True]
    assert propose(((0.1, 1.0, 10.0),), flat) == (100.0,)
    assert propose(((0.1, 1.0, 10.0),), {**flat, (100.0,): Score(0.2)}) == (3.16,)


def test_loss_decides_among_accuracies_within_a_standard_error() -> None:
    """A head that starts at zero has a high accuracy after any step; its loss stays high."""
    plateau = {
        (0.1,): Score(0.95, 2.3, 0.02),
        (1.0,): Score(0.95, 1.5, 0.02),
        (10.0,): Score(0.94, 0.3, 0.02),
    }
    assert best(plateau) == (10.0,)
    assert best({**plateau, (100.0,): Score(0.90, 0.1, 0.02)}) == (10.0,), (
        "more than one standard error below"
    )
    assert best({**plateau, (100.0,): Score(0.98, 0.9, 0.01)}) == (100.0,), (
        "clearly better, so its loss does not matter"
    )
    assert best({p: s._replace(error=0.0) for p, s in plateau.items()}) == (1.0,)


def test_both_ends_of_a_plateau_take_turns() -> None:
    _, order = search([((1.0, 10.0),)], lambda i, point: 0.1)
    assert order[0] == [(1.0,), (10.0,), (100.0,), (0.1,), (1000.0,), (0.01,), (10000.0,)]


def stuck(loss: float, accuracy: float = 0.51) -> Score:
    return Score(accuracy, loss, error=0.024, blind_accuracy=0.51, blind_loss=0.693)


def test_without_learning_both_ends_are_tried_and_loss_is_ignored() -> None:
    """A rate too small to change the model has the lowest loss, so loss is not used here."""
    grid = (0.1, 0.3, 1.0)
    scored = {(0.1,): stuck(0.692), (0.3,): stuck(0.9, 0.52), (1.0,): stuck(2.4)}
    assert lost(scored)
    assert at_edges(scored) == [True]
    assert propose((grid,), scored) == (3.16,)
    assert propose((grid,), {**scored, (3.16,): stuck(2.7)}) == (0.0316,)
    found = {**scored, (3.16,): stuck(1.0, 0.77)}
    assert not lost(found)
    assert (at_edges(found), propose((grid,), found)) == ([True], (9.99,))
    assert not lost(
        {point: score._replace(blind_accuracy=0.0) for point, score in scored.items()}
    ), "no classes"


def test_a_lower_loss_shows_learning_at_the_accuracy_of_one_answer() -> None:
    """Nine of ten records have the same class."""
    rare = {
        (rate,): Score(0.915, loss, 0.02, 0.9, 0.325)
        for rate, loss in ((0.1, 0.32), (0.3, 0.20), (1.0, 0.5))
    }
    assert not lost(rare)
    assert (at_edges(rare), propose(((0.1, 0.3, 1.0),), rare)) == ([False], (0.173,))


def test_without_learning_no_rate_beyond_a_diverged_one_is_tried() -> None:
    grid = (0.1, 0.3, 1.0)
    gone = Score(0.0, math.inf, 0.0, 0.51, 0.693)
    assert propose((grid,), {(0.1,): stuck(0.69), (0.3,): gone, (1.0,): gone}) == (0.0316,)
    assert propose((grid,), {(value,): gone for value in grid}) == (0.0316,)
    tie = [((0.1,), stuck(math.inf)), ((0.3,), stuck(0.69))]
    assert lost(dict(tie)) is lost(dict(tie[::-1])) is True


def test_without_learning_both_keys_take_turns() -> None:
    space: Space = ((0.01, 0.1, 1.0), (0.001, 0.01, 0.1))
    scored = dict.fromkeys(initial(space, 5), stuck(0.693))
    asked = []
    for _ in range(4):
        asked.append(propose(space, scored))
        scored[asked[-1]] = stuck(0.693)
    assert len(set(asked)) == 4
    assert {max(point) > 1 or point[1] > 0.1 for point in asked} == {True, False}
    assert {point[0] in (0.001, 10.0) for point in asked} == {True, False}, "one key at a time"


def test_if_all_rates_diverge_smaller_ones_follow() -> None:
    grid = (1.0, 10.0, 100.0)
    diverged = {(value,): Score(0.0, math.inf) for value in grid}
    assert propose((grid,), diverged) == (0.1,)
    assert propose((grid,), {**diverged, (0.1,): Score(0.0, math.inf)}) == (0.01,)


def test_smaller_grids_grow_to_the_largest_first() -> None:
    scored, order = search([((1.0, 10.0, 100.0, 1000.0),), ((1.0, 10.0),)], hill(10.5))
    assert [len(s) for s in scored] == [6, 6]
    assert order[1][:3] == [(1.0,), (10.0,), (100.0,)], "10 is at the edge of its two values"


def test_two_rates_share_the_same_number_of_runs() -> None:
    one: Space = ((0.01, 0.1, 1.0, 10.0),)
    two: Space = ((0.01, 0.1, 1.0, 10.0), (0.001, 0.01, 0.1))

    def score(i: int, point: Point) -> float:
        return -sum(
            abs(math.log(value / top)) for value, top in zip(point, (0.2, 0.3), strict=False)
        )

    scored, order = search([one, two], score)
    assert len(scored[0]) == len(scored[1])
    # The cross through (0.1, 0.01): each key up, then the first key down.
    assert order[1][:4] == [(0.1, 0.01), (1.0, 0.01), (0.1, 0.1), (0.01, 0.01)]
    # (0.1, 0.1) is best, and its second value the largest tried one: outside by the ratio.
    assert order[1][4] == (0.1, 1.0)
    # Both keys are inside now, and the second key has its turn: between 0.1 and 1.0.
    assert order[1][5] == (0.1, 0.316)


def test_arms_without_a_tuned_key_need_no_runs() -> None:
    assert next_points([()], [{}]) == [[]]
    scored, _ = search([(), ((0.1, 1.0),)], lambda i, p: 1.0 if p == (0.1,) else 0.0)
    assert len(scored[0]) == 0


def test_the_next_points_do_not_depend_on_the_order_of_results() -> None:
    """Until the shared stages, the points of an arm depend on its own scores alone."""
    space: Space = ((0.1, 1.0, 10.0),)
    ahead = {(0.1,): Score(0.1), (1.0,): Score(0.5), (10.0,): Score(0.2), (3.16,): Score(0.4)}
    assert next_points([space, space], [ahead, {}])[0] == next_points([space], [ahead])[0]


@pytest.mark.parametrize(
    ("grid", "expected"), [((1.0, 3.0, 9.0), 3.0), ((5.0,), math.sqrt(10)), ((1.0, 100.0), 100.0)]
)
def test_ratio(grid: tuple[float, ...], expected: float) -> None:
    assert ratio(grid) == pytest.approx(expected)


rates = st.floats(1e-5, 1e2).map(lambda x: float(f"{x:.2g}"))
grids = st.lists(rates, min_size=1, max_size=5, unique=True).map(lambda v: tuple(sorted(v)))
spaces = st.lists(st.lists(grids, min_size=1, max_size=2).map(tuple), min_size=1, max_size=4)


@given(spaces, st.integers(0, 3), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_arm_gets_the_same_number_of_runs(
    spaces: list[Space], extra: int, more: int, random: object
) -> None:
    seen: dict[tuple[int, Point], float] = {}

    def score(i: int, point: Point) -> float:
        return seen.setdefault((i, point), random.choice([0.0, 0.1, 0.5, 0.9]))  # type: ignore[attr-defined]

    scored, _ = search(spaces, score, extra, extra + more)
    first = max(len(grid) for space in spaces for grid in space)
    counts = {len(s) for s in scored}
    assert len(counts) == 1
    assert first + extra <= counts.pop() <= first + extra + more


@given(grids, st.floats(1e-6, 1e3))
def test_a_single_maximum_is_bracketed_or_reported_at_the_edge(
    grid: tuple[float, ...], top: float
) -> None:
    scored, _ = search([(grid,)], hill(top))
    found, values = best(scored[0])[0], sorted(p[0] for p in scored[0])
    if at_edges(scored[0]) == [False]:
        at = values.index(found)
        assert values[at - 1] <= top <= values[at + 1]
    else:
        assert len(values) == len(grid) + 5, "all stages were used before giving up"


def test_initial_has_no_repeats_and_no_more_than_asked() -> None:
    space: Space = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert initial(space, 99) == [(2.0, 5.0), (3.0, 5.0), (2.0, 6.0), (1.0, 5.0), (2.0, 4.0)]
    assert initial(space, 2) == [(2.0, 5.0), (3.0, 5.0)]


def test_the_error_of_a_mean_is_never_below_that_of_one_seed() -> None:
    one = Score(0.8, 0.5, 0.02, 0.6, 0.69)
    assert mean([one]) == one
    assert mean([one] * 4) == pytest.approx(one), "they are scored on the same records"
    apart = mean([Score(0.5, 0.7, 0.02), Score(0.9, 0.3, 0.02)])
    # The variance of 0.5 and 0.9 is 0.08 (n - 1), so the error of the mean is sqrt(0.08 / 2).
    assert apart == pytest.approx(Score(0.7, 0.5, 0.2))
    assert mean([one, Score(0.0, math.inf, 0.0)]).loss == math.inf, "one seed diverged"


def test_without_accuracy_the_lowest_loss_decides() -> None:
    """Predicted numbers: the losses of two seeds are 1 and 3, and 2.5 and 2.5."""
    uneven = mean([Score(None, 1.0, 0.0, 0.0, 4.0), Score(None, 3.0, 0.0, 0.0, 4.0)])
    assert uneven == Score(None, 2.0, 0.0, 0.0, 4.0)
    even = mean([Score(None, 2.5, 0.0, 0.0, 4.0), Score(None, math.inf)])
    assert even == Score(None, math.inf, 0.0, 0.0, 4.0)
    scored = {(0.1,): uneven, (0.2,): even, (0.3,): Score(None, 1.9)}
    assert best(scored) == (0.3,)
    assert decision(scored) == "the lowest loss, 1.9000"


def test_numbers_without_a_better_loss_than_their_variance_are_lost() -> None:
    """A model that always says the mean has a loss equal to the variance, here 4."""
    assert lost({(0.1,): Score(None, 3.99, 0.0, 0.0, 4.0)})
    assert not lost({(0.1,): Score(None, 3.0, 0.0, 0.0, 4.0)})
    assert not lost({(0.1,): Score(None, 3.99)}), "the variance is not known"

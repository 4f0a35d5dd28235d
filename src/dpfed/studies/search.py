"""A search for the best rates that spends the same number of runs on every method. No I/O, nothing at random.

A space is one grid per tuned key; a point is one value per key. Every arm begins with as many points as the largest
grid has. After that each stage gives every arm one more: outside the range by the grid's ratio where the best value (or
one as good) is at an edge of what was tried, else between the best value and its better neighbour. There are at least
`extra` stages, and more, up to `limit`, while any arm is at an edge. What comes next follows from the scores alone, so a
search that was interrupted goes on as if it had not been.

The best is the highest accuracy, but accuracies within one standard error of it are told apart by their loss: on a small
validation set many rates reach the same count of right answers, even ones too small to have trained anything.

Where no rate is better than one answer for all records, nothing says in which direction better ones lie: the arm is at both
edges, and they take turns, larger rates first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpfed.privacy.published import show_score

Grid = tuple[float, ...]
Space = tuple[Grid, ...]
Point = tuple[float, ...]


class Score(NamedTuple):
    """On the validation half; `error` is the standard error of the accuracy, given how many records that has. `blind_accuracy`
    and `blind_loss` are those of the best answer that is the same for all of them, 0 where there is none."""

    accuracy: float
    loss: float = 0.0
    error: float = 0.0
    blind_accuracy: float = 0.0
    blind_loss: float = 0.0


Scores = Mapping[Point, Score]


def mean(scores: Sequence[Score]) -> Score:
    """Of several seeds. All are scored on the same records, so their error is not smaller than that of one such score; it is
    larger where seeds differ by more than that."""
    count = len(scores)
    accuracy = sum(score.accuracy for score in scores) / count
    spread = sum((score.accuracy - accuracy) ** 2 for score in scores) / max(1, count - 1)
    error = max(math.sqrt(spread / count), sum(score.error for score in scores) / count)
    first = max(
        scores, key=lambda score: score.blind_accuracy
    )  # a seed that diverged may not know it
    return first._replace(
        accuracy=accuracy, loss=sum(score.loss for score in scores) / count, error=error
    )


EXTRA, LIMIT = 2, 5
TAUGHT = 0.98  # a loss below this share of the blind one has learned something
LONE = math.sqrt(10)  # the ratio of a grid with one value


def largest(spaces: Sequence[Space]) -> int:
    return max((len(grid) for space in spaces for grid in space), default=0)


def next_points(
    spaces: Sequence[Space],
    scored: Sequence[Scores],
    extra: int = EXTRA,
    limit: int = LIMIT,
    first: int | None = None,
) -> list[list[Point]]:
    """For each arm the points to run now; all empty when the search is over. An arm without keys needs none.

    first  how many points every arm begins with; given by a study in which an arm has failed, so that it stays the same
    """
    first = largest(spaces) if first is None else first
    arms = [i for i, space in enumerate(spaces) if space]
    todo: list[list[Point]] = [[] for _ in spaces]
    target = points_per_arm([scored[i] for i in arms], first, extra, limit)
    for i in arms:
        if len(scored[i]) < target:
            missing = [point for point in initial(spaces[i], first) if point not in scored[i]]
            todo[i] = missing or [propose(spaces[i], scored[i])]
    return todo


def points_per_arm(scored: Sequence[Scores], first: int, extra: int, limit: int) -> int:
    """Return how many points every tuned arm gets, as far as the scores say now.

    The number can still grow, up to `first + limit`, until every arm has this many points.
    """
    counts = [len(scores) for scores in scored]
    if not counts:
        return 0
    target = max(first + extra, *counts)
    stage_is_over = min(counts) >= target
    if stage_is_over and target < first + limit and any(any(at_edges(scores)) for scores in scored):
        target += 1
    return target


def initial(space: Space, count: int) -> list[Point]:
    """One key: its grid. Several keys: `count` points of the cross through the middle of their grids."""
    if len(space) == 1:
        return [(value,) for value in sorted(space[0])]
    grids = [sorted(grid) for grid in space]
    middle = [(len(grid) - 1) // 2 for grid in grids]
    points = [tuple(grid[m] for grid, m in zip(grids, middle, strict=True))]
    for distance in range(1, max(len(grid) for grid in grids)):
        for sign in (1, -1):
            for key, grid in enumerate(grids):
                at = middle[key] + sign * distance
                if 0 <= at < len(grid):
                    points.append(_moved(points[0], key, grid[at]))
    return points[:count]


def best(scored: Scores) -> Point:
    """The winner; among equals the smallest rates."""
    return min(winners(scored))


def winners(scored: Scores) -> list[Point]:
    """The points with the lowest loss among those as accurate as the best, up to its error; mostly one."""
    top = max(scored.values(), key=lambda score: score.accuracy)
    close = {point: s for point, s in scored.items() if s.accuracy >= top.accuracy - top.error}
    lowest = min(score.loss for score in close.values())
    return [point for point, score in close.items() if score.loss == lowest]


def decision(scored: Scores) -> str:
    """Return the score of the best point in words, and what decided for it: accuracy or loss."""
    chosen = scored[best(scored)]
    top = max(scored.values(), key=lambda score: score.accuracy)
    close = [score for score in scored.values() if score.accuracy >= top.accuracy - top.error]
    if len(close) == 1:
        return f"the highest accuracy, {show_score(chosen.accuracy)}"
    return (
        f"the lowest loss, {show_score(chosen.loss, 4)}, of {len(close)} tries within one standard error "
        f"of the highest accuracy, {show_score(top.accuracy)}"
    )


def lost(scored: Scores) -> bool:
    """Whether no rate has taught anything: none is better than one answer for all, by accuracy or by loss."""
    top = max(scored.values(), key=lambda score: (score.accuracy, -score.loss))
    least = min(score.loss for score in scored.values())
    return (
        top.blind_accuracy > 0
        and top.accuracy <= top.blind_accuracy + top.error
        and TAUGHT * top.blind_loss <= least < math.inf
    )


def at_edges(scored: Scores) -> list[bool]:
    """For each key whether a best value, or one as good, is the smallest or the largest that was tried."""
    ends = [_ends(scored, key) for key in range(len(best(scored)))]
    return [low or high for low, high in ends]


def _ends(scored: Scores, key: int) -> tuple[bool, bool]:
    tried = {point[key] for point in scored}
    if lost(scored):
        return True, any(
            math.isfinite(score.loss) for point, score in scored.items() if point[key] == max(tried)
        )
    good = {point[key] for point in winners(scored)}
    return min(tried) in good, max(tried) in good


def propose(space: Space, scored: Scores) -> Point:
    """The next point: a key whose best value is at an edge comes first; several keys, and both edges, take turns."""
    edges = at_edges(scored)
    keys = [key for key, edge in enumerate(edges) if edge] or list(range(len(edges)))
    key = keys[len(scored) % len(keys)]
    values = sorted({point[key] for point in scored})
    if edges[key]:
        low, high = _ends(scored, key)
        diverged = math.isinf(
            scored[best(scored)].loss
        )  # all of them, then: the rates are too large
        up = high and (not low or (not diverged and _larger_next(values, space[key])))
        end, factor = (values[-1], ratio(space[key])) if up else (values[0], 1 / ratio(space[key]))
        start = best({point: score for point, score in scored.items() if point[key] == end})
        return _moved(start, key, _rounded(end * factor, values))

    top = best(scored)
    at = values.index(top[key])
    beside = (values[at - 1], values[at + 1])
    neighbour = best({point: score for point, score in scored.items() if point[key] in beside})[key]
    if (
        _moved(top, key, neighbour) not in scored
    ):  # with several keys: a value that was tried elsewhere only
        return _moved(top, key, neighbour)
    return _moved(top, key, _rounded(math.sqrt(top[key] * neighbour), values))


def _larger_next(tried: Sequence[float], grid: Grid) -> bool:
    """Whether it is the turn of the upper edge: it is no farther from the middle of the grid than the lower one."""
    middle = math.sqrt(max(grid) * min(grid))
    return max(tried) / middle <= 1.01 * middle / min(tried)  # values are rounded


def ratio(grid: Grid) -> float:
    """The mean ratio of neighbouring values."""
    if len(grid) < 2:
        return LONE
    return float((max(grid) / min(grid)) ** (1 / (len(grid) - 1)))


def _moved(point: Point, key: int, value: float) -> Point:
    return (*point[:key], value, *point[key + 1 :])


def _rounded(lr: float, tried: Sequence[float]) -> float:
    """Three digits are easier to read and repeat; all of them where three would give a value that was tried."""
    short = float(f"{lr:.3g}")
    return lr if short in tried else short

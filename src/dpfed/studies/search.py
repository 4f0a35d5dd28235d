"""Search for the best learning rates, with the same number of runs for every method.

A space has one grid per tuned key; a point is one value per key. Every method begins with as many
points as the largest grid has values. Each further stage adds one point to every method:

    best value             next point
    at an edge             outside the tried values, by the ratio of the grid's neighbours
    between tried values   between the best value and its better neighbour

There are at least `extra` further stages. While the best value of any method is at an edge, more
stages follow, up to `limit`. The scores alone determine the next points, so an interrupted search
can be resumed.

The best point has the lowest loss of all points within one standard error of the highest accuracy.
Accuracy alone does not decide: on a small validation set many rates give equally many right
answers. For predicted numbers, which have no accuracy, the lowest loss decides.

If no rate is better than a model that ignores its input, the direction of better rates is unknown.
Points are then added at both edges in turn, first at the larger rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpfed.privacy.published import show_score

Grid = tuple[float, ...]
Space = tuple[Grid, ...]
Point = tuple[float, ...]

EXTRA = 2
LIMIT = 5
# A model has learned if its loss is below this share of the loss of a model that ignores its input.
TAUGHT = 0.98
# If the user gives only one candidate value, the next values are this value times or divided by
# this factor.
LONE = math.sqrt(10)


class Score(NamedTuple):
    """The result of a point on the validation half of the public data.

    accuracy                    None for a task without accuracy
    error                       standard error of the accuracy
    blind_accuracy, blind_loss  values of the best model that ignores its input; 0 if unknown
    """

    accuracy: float | None
    loss: float = 0.0
    error: float = 0.0
    blind_accuracy: float = 0.0
    blind_loss: float = 0.0


Scores = Mapping[Point, Score]


def mean(scores: Sequence[Score]) -> Score:
    """Return the mean score of several seeds.

    All seeds are scored on the same records. The standard error of the mean is therefore at least
    the average standard error of a seed. It is larger if the seeds' accuracies differ by more.
    """
    count = len(scores)
    loss = sum(score.loss for score in scores) / count
    # A seed that diverged may have no blind values. Take the blind values of another seed.
    informed = max(scores, key=lambda score: (score.blind_accuracy, score.blind_loss))
    accuracies = [score.accuracy for score in scores if score.accuracy is not None]
    if not accuracies:
        return informed._replace(loss=loss)
    accuracy = sum(accuracies) / count
    spread = sum((value - accuracy) ** 2 for value in accuracies) / max(1, count - 1)
    error = max(math.sqrt(spread / count), sum(score.error for score in scores) / count)
    return informed._replace(accuracy=accuracy, loss=loss, error=error)


def largest(spaces: Sequence[Space]) -> int:
    """Return the number of values of the largest grid."""
    return max((len(grid) for space in spaces for grid in space), default=0)


def next_points(
    spaces: Sequence[Space],
    scored: Sequence[Scores],
    extra: int = EXTRA,
    limit: int = LIMIT,
    first: int | None = None,
) -> list[list[Point]]:
    """Return the points that each method runs next; all lists are empty at the end of the search.

    spaces  the grids of each method
    scored  the scores of the points that each method has run
    extra   number of stages after the first that are always run
    limit   largest number of stages after the first
    first   number of points of the first stage; None for the size of the largest grid in `spaces`.
            Give the number if `spaces` lacks failed methods, whose grids may be larger.
    """
    first = largest(spaces) if first is None else first
    tuned = [i for i, space in enumerate(spaces) if space]
    todo: list[list[Point]] = [[] for _ in spaces]
    target = points_per_arm([scored[i] for i in tuned], first, extra, limit)
    for i in tuned:
        if len(scored[i]) < target:
            missing = [point for point in initial(spaces[i], first) if point not in scored[i]]
            todo[i] = missing or [propose(spaces[i], scored[i])]
    return todo


def points_per_arm(scored: Sequence[Scores], first: int, extra: int, limit: int) -> int:
    """Return the number of points that every tuned method needs, according to the scores so far.

    While a method has fewer points, the number can still grow, up to `first + limit`.
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
    """Return the first points of a search.

    For one key, these are all values of its grid. For several keys, these are at most `count`
    points: the middle of all grids, then points that differ from it in one key.
    """
    if len(space) == 1:
        return [(value,) for value in sorted(space[0])]
    grids = [sorted(grid) for grid in space]
    middle = [(len(grid) - 1) // 2 for grid in grids]
    points = [tuple(grid[m] for grid, m in zip(grids, middle, strict=True))]
    for distance in range(1, max(map(len, grids))):
        for sign in (1, -1):
            for key, grid in enumerate(grids):
                at = middle[key] + sign * distance
                if 0 <= at < len(grid):
                    points.append(_moved(points[0], key, grid[at]))
    return points[:count]


def best(scored: Scores) -> Point:
    """Return the best point; among equally good points, return the smallest rates."""
    return min(winners(scored))


def _close_to_top(scored: Scores) -> dict[Point, Score]:
    """Return the scores of all points within one standard error of the highest accuracy."""
    top = _top(scored)
    least = _accuracy(top) - top.error
    return {point: score for point, score in scored.items() if _accuracy(score) >= least}


def _top(scored: Scores) -> Score:
    return max(scored.values(), key=_accuracy)


def _accuracy(score: Score) -> float:
    """Return the accuracy. It is 0 for all points of a task without accuracy."""
    return 0.0 if score.accuracy is None else score.accuracy


def winners(scored: Scores) -> list[Point]:
    """Return the points with the lowest loss among all points that `_close_to_top` returns."""
    close = _close_to_top(scored)
    lowest = min(score.loss for score in close.values())
    return [point for point, score in close.items() if score.loss == lowest]


def decision(scored: Scores) -> str:
    """Return a text that says whether accuracy or loss selected the best point."""
    chosen = scored[best(scored)]
    close = _close_to_top(scored)
    if chosen.accuracy is None:
        return f"the lowest loss, {show_score(chosen.loss, 4)}"
    if len(close) == 1:
        return f"the highest accuracy, {show_score(chosen.accuracy)}"
    return (
        f"the lowest loss, {show_score(chosen.loss, 4)}, of {len(close)} tries within one standard "
        f"error of the highest accuracy, {show_score(_top(scored).accuracy)}"
    )


def lost(scored: Scores) -> bool:
    """Return True if no point is better than a model that ignores its input.

    A point is better if its accuracy is clearly higher or its loss clearly lower.
    """
    top = max(scored.values(), key=lambda score: (_accuracy(score), -score.loss))
    least = min(score.loss for score in scored.values())
    return (
        (top.blind_accuracy > 0 or top.blind_loss > 0)
        and _accuracy(top) <= top.blind_accuracy + top.error
        and TAUGHT * top.blind_loss <= least < math.inf
    )


def at_edges(scored: Scores) -> list[bool]:
    """Return for each key True if better values may lie outside the range of tried values."""
    return [any(_edges(scored, key)) for key in range(len(best(scored)))]


def _edges(scored: Scores, key: int) -> tuple[bool, bool]:
    """Return two booleans: True if better values of a key may lie below, or above, tried values."""
    tried = {point[key] for point in scored}
    if lost(scored):
        at_top = [score for point, score in scored.items() if point[key] == max(tried)]
        return True, any(math.isfinite(score.loss) for score in at_top)
    good = {point[key] for point in winners(scored)}
    return min(tried) in good, max(tried) in good


def propose(space: Space, scored: Scores) -> Point:
    """Return the next point: the best point or a point at an edge, with one value replaced.

    Keys whose best value is at an edge come first; several such keys take turns.
    """
    edges = at_edges(scored)
    keys = [key for key, edge in enumerate(edges) if edge] or list(range(len(edges)))
    key = keys[len(scored) % len(keys)]
    if edges[key]:
        return _beyond_edge(space[key], scored, key)
    values = sorted({point[key] for point in scored})
    top = best(scored)
    at = values.index(top[key])
    beside = (values[at - 1], values[at + 1])
    neighbour = best({point: score for point, score in scored.items() if point[key] in beside})[key]
    # The neighbour may have been tried only together with other values of the other keys.
    if _moved(top, key, neighbour) not in scored:
        return _moved(top, key, neighbour)
    return _moved(top, key, _rounded(math.sqrt(top[key] * neighbour), values))


def _beyond_edge(grid: Grid, scored: Scores, key: int) -> Point:
    low, high = _edges(scored, key)
    values = sorted({point[key] for point in scored})
    # If even the best point has diverged, all rates are too large.
    all_diverged = math.isinf(scored[best(scored)].loss)
    up = high and (not low or (not all_diverged and _upper_edge_is_next(values, grid)))
    end = values[-1] if up else values[0]
    factor = ratio(grid) if up else 1 / ratio(grid)
    start = best({point: score for point, score in scored.items() if point[key] == end})
    return _moved(start, key, _rounded(end * factor, values))


def _upper_edge_is_next(tried: Sequence[float], grid: Grid) -> bool:
    """Return True if the upper edge is at most as far from the grid's middle as the lower edge."""
    middle = math.sqrt(max(grid) * min(grid))
    tolerance_for_rounding = 1.01
    return max(tried) / middle <= tolerance_for_rounding * middle / min(tried)


def ratio(grid: Grid) -> float:
    """Return the mean ratio of neighbouring values of a grid."""
    if len(grid) < 2:
        return LONE
    return float((max(grid) / min(grid)) ** (1 / (len(grid) - 1)))


def _moved(point: Point, key: int, value: float) -> Point:
    return (*point[:key], value, *point[key + 1 :])


def _rounded(lr: float, tried: Sequence[float]) -> float:
    """Return the rate rounded to three digits, or unrounded if the rounded rate has been tried."""
    short = float(f"{lr:.3g}")
    return lr if short in tried else short

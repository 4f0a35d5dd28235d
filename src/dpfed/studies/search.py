"""Search for the best learning rates, with the same number of runs for every method.

A tuned key is a learning rate of a method: `lr`, or `server_lr`. Each has a grid of first values.
The space of a method is the grids of its keys. A point is one value for each key.

Every method begins with as many points as the largest grid has values. Each further stage of the
search adds one point to every method:

    best value                       next point
    smallest or largest tried value  outside the tried values, by the ratio of the grid's neighbours
    between tried values             between the best value and its better neighbour

There are at least `extra` further stages. While the best value of any method is at an edge (the
smallest or largest tried value), more stages follow, up to `limit`. The scores alone determine the
next points, so an interrupted search can be resumed.

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
# A model has learned something if its loss is below this fraction of the loss of a model that
# ignores its input.
TAUGHT = 0.98
# If the user gives only one learning rate, its neighbours in the search are the rate times this
# factor and the rate divided by it.
LONE = math.sqrt(10)


class Score(NamedTuple):
    """The score of a point (learning rates) on the validation half of the public test data.

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
    """Return the mean of the scores that runs with several seeds reached.

    All runs are scored on the same records, so averaging does not remove the error from the choice
    of the records. Therefore, the error is at least the mean of the runs' errors. It is larger if
    the accuracies of the runs vary more.
    """
    count = len(scores)
    loss = sum(score.loss for score in scores) / count
    # A run that diverged may lack the scores of a model that ignores its input. Take these scores
    # from another run.
    informed = max(scores, key=lambda score: (score.blind_accuracy, score.blind_loss))
    accuracies = [score.accuracy for score in scores if score.accuracy is not None]
    if not accuracies:
        return informed._replace(loss=loss)
    accuracy = sum(accuracies) / count
    spread = sum((value - accuracy) ** 2 for value in accuracies) / max(1, count - 1)
    error = max(math.sqrt(spread / count), sum(score.error for score in scores) / count)
    return informed._replace(accuracy=accuracy, loss=loss, error=error)


def largest(spaces: Sequence[Space]) -> int:
    """Return the number of learning rates in the largest grid of all methods."""
    return max((len(grid) for space in spaces for grid in space), default=0)


def next_points(
    spaces: Sequence[Space],
    scored: Sequence[Scores],
    extra: int = EXTRA,
    limit: int = LIMIT,
    first: int | None = None,
) -> list[list[Point]]:
    """Return, for each method, the points to try next; all lists are empty when the search ends.

    A point is one learning rate for each tuned key.

    spaces  the grids of each method: first values of its tuned keys
    scored  the scores of the points that each method has tried
    extra   number of further points that every method tries after the first points
    limit   largest number of further points
    first   number of first points; None for the size of the largest grid in `spaces`. Pass the
            number if `spaces` lacks methods that failed, because their grids may be larger.
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
    """Return the number of points that the search tries for every arm (method with its settings).

    The number follows from the scores so far. Until all arms have been tried at that many points,
    it can still grow, up to `first + limit`.
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
    """Return the first points that the search tries for a method.

    For one tuned key, these are all values of its grid. For several keys, these are at most `count`
    points: first the middle values of all grids, then points that differ from them in one key.
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
    """Return the best point; of equally good points, the one with the smallest rates."""
    return min(winners(scored))


def _close_to_top(scored: Scores) -> dict[Point, Score]:
    """Return the points (learning rates) within one standard error of the highest accuracy."""
    top = _top(scored)
    least = _accuracy(top) - top.error
    return {point: score for point, score in scored.items() if _accuracy(score) >= least}


def _top(scored: Scores) -> Score:
    return max(scored.values(), key=_accuracy)


def _accuracy(score: Score) -> float:
    """Return the accuracy; 0 for a task without accuracy, so that all points are equal."""
    return 0.0 if score.accuracy is None else score.accuracy


def winners(scored: Scores) -> list[Point]:
    """Return, of the points with an accuracy close to the highest, those with the lowest loss."""
    close = _close_to_top(scored)
    lowest = min(score.loss for score in close.values())
    return [point for point, score in close.items() if score.loss == lowest]


def decision(scored: Scores) -> str:
    """Return a text that says if accuracy or loss selected the best learning rates."""
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
    """Return True if no tried learning rate led to a better model than one that ignores its input.

    A model is better if its accuracy is clearly higher or its loss clearly lower.
    """
    top = max(scored.values(), key=lambda score: (_accuracy(score), -score.loss))
    least = min(score.loss for score in scored.values())
    return (
        (top.blind_accuracy > 0 or top.blind_loss > 0)
        and _accuracy(top) <= top.blind_accuracy + top.error
        and TAUGHT * top.blind_loss <= least < math.inf
    )


def at_edges(scored: Scores) -> list[bool]:
    """Return, for each tuned key, True if better values may lie outside the tried values."""
    return [any(_edges(scored, key)) for key in range(len(best(scored)))]


def _edges(scored: Scores, key: int) -> tuple[bool, bool]:
    """Return two booleans: better values of a learning rate may lie below, above the tried ones."""
    tried = {point[key] for point in scored}
    if lost(scored):
        at_top = [score for point, score in scored.items() if point[key] == max(tried)]
        return True, any(math.isfinite(score.loss) for score in at_top)
    good = {point[key] for point in winners(scored)}
    return min(tried) in good, max(tried) in good


def propose(space: Space, scored: Scores) -> Point:
    """Return the next learning rates to try: tried ones, with the value of one key changed.

    Keys whose best value is the smallest or largest tried value are changed first, in turn.
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
    # With several keys, the neighbour may have been tried only with other values of other keys.
    # Then try it with the best values of these keys.
    if _moved(top, key, neighbour) not in scored:
        return _moved(top, key, neighbour)
    return _moved(top, key, _rounded(math.sqrt(top[key] * neighbour), values))


def _beyond_edge(grid: Grid, scored: Scores, key: int) -> Point:
    low, high = _edges(scored, key)
    values = sorted({point[key] for point in scored})
    # If training diverged even at the best point, all tried learning rates are too large. The next
    # one is then smaller.
    all_diverged = math.isinf(scored[best(scored)].loss)
    up = high and (not low or (not all_diverged and _upper_edge_is_next(values, grid)))
    end = values[-1] if up else values[0]
    factor = ratio(grid) if up else 1 / ratio(grid)
    start = best({point: score for point, score in scored.items() if point[key] == end})
    return _moved(start, key, _rounded(end * factor, values))


def _upper_edge_is_next(tried: Sequence[float], grid: Grid) -> bool:
    """Return True if the next value is to be tried above the tried values, False if below.

    The side that has been extended less from the middle of the grid is next.
    """
    middle = math.sqrt(max(grid) * min(grid))
    tolerance_for_rounding = 1.01
    return max(tried) / middle <= tolerance_for_rounding * middle / min(tried)


def ratio(grid: Grid) -> float:
    """Return the geometric mean of the ratios of neighbouring values in a grid."""
    if len(grid) < 2:
        return LONE
    return float((max(grid) / min(grid)) ** (1 / (len(grid) - 1)))


def _moved(point: Point, key: int, value: float) -> Point:
    return (*point[:key], value, *point[key + 1 :])


def _rounded(lr: float, tried: Sequence[float]) -> float:
    """Return a learning rate rounded to three digits; unrounded if the result was tried before."""
    short = float(f"{lr:.3g}")
    return lr if short in tried else short

"""Find the smallest noise multiplier sigma that keeps a training plan within a target epsilon.

The function that computes the reported epsilon also checks the returned sigma. A reported epsilon
therefore never exceeds the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from scipy.optimize import brentq

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.accounting.loss_distribution import (
    canonical,
    compose,
    interval_for,
    loss_spread,
    rounding,
    steps_of,
)
from dpfed.privacy.accounting.observers import VIEWS, Rounds, View, as_seen, view_epsilon
from dpfed.privacy.accounting.pld import rough_epsilon
from dpfed.privacy.published import show_loss, show_setting

RELATIVE_TOLERANCE = 1e-3
LARGEST_SIGMA = 1e4
# Smallest sigma of the search. A smaller sigma would have a meaninglessly large epsilon.
_SMALLEST_SIGMA = 1e-2
_COARSE_TOLERANCE = 1e-5
# The search computes its first exact epsilon at the estimated sigma times 1 + _SAFE. With this
# margin, the first epsilon is usually within the target.
_SAFE = 2e-4


def calibrate_sigma(
    plan: Rounds, target_epsilon: float, delta: float, view: View = "server_worst"
) -> float:
    """Return the smallest noise multiplier sigma >= 0.01 whose epsilon does not exceed the target.

    The relative precision is 1e-3. Raise DpfedError if no sigma is large enough.

    plan  rounds and mechanism; `probability` is the probability that a client takes part in a
          round, and the noise of the mechanism is ignored
    view  the observer for whom the epsilon holds, as in `view_epsilon`
    """
    exact, coarse = _epsilons_of(plan, target_epsilon, delta, view)
    return smallest_sigma(exact, target_epsilon, coarse)


def estimate_sigma(
    plan: Rounds, target_epsilon: float, delta: float, view: View = "server_worst"
) -> float:
    """Return a quick estimate of the sigma of `calibrate_sigma`, for tables of many plans.

    The estimate is usually a little too large. Its epsilon is not checked, so no run may use it.
    """
    _, coarse = _epsilons_of(plan, target_epsilon, delta, view)
    return _crossing(coarse, target_epsilon, (1.0, 2.0), RELATIVE_TOLERANCE)


def _epsilons_of(
    plan: Rounds, target_epsilon: float, delta: float, view: View
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return two functions of the noise multiplier: the exact epsilon, and a quick estimate."""
    check_delta(delta)
    _check_target(target_epsilon)
    if view not in VIEWS:
        raise DpfedError(
            f"there is no view {view!r}; use server_worst, server_expected or third_party."
        )
    if plan.local_steps * plan.rounds * plan.probability == 0:
        raise DpfedError(
            "a plan without any local step spends nothing, so there is no sigma to calibrate."
        )

    def with_noise(sigma: float) -> Rounds:
        return replace(plan, step=replace(plan.step, noise_multiplier=sigma))

    def exact(sigma: float) -> float:
        return view_epsilon(view, with_noise(sigma), delta)

    def coarse(sigma: float) -> float:
        return _coarse_epsilon(as_seen(view, with_noise(sigma)), target_epsilon, delta)

    return exact, coarse if plan.step.sampling == "poisson" else exact


def _check_target(target_epsilon: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise DpfedError(
            f"a target epsilon must be a number above 0, not {show_setting(target_epsilon)}."
        )


def _coarse_epsilon(plan: Rounds, target: float, delta: float) -> float:
    """Return a quick estimate of epsilon, a little too large, that guides the search for sigma.

    The privacy losses are rounded to a coarser grid than for the reported epsilon. If epsilon is
    far above the target, the estimate of Renyi DP is returned instead. A loss grid that is fine
    enough for the target would be too large for such an epsilon.
    """
    terms = canonical([plan.term])
    rough = rough_epsilon(terms, delta)
    if rough > 20 * target + 2:
        return rough
    interval = max(
        interval_for(target, terms), min(8 * interval_for(target), loss_spread(terms) / 20)
    )
    distribution = compose(terms, interval)
    return float(distribution.get_epsilon_for_delta(delta - rounding(steps_of(terms))))


def smallest_sigma(
    exact: Callable[[float], float], target: float, coarse: Callable[[float], float]
) -> float:
    """Return the smallest sigma with exact(sigma) <= target, to a relative precision of 1e-3.

    exact   function from sigma to epsilon, decreasing
    coarse  quick estimate of `exact`, which only decides at which sigmas `exact` is computed
    """
    _check_target(target)
    computed: dict[float, float] = {}

    def recorded(sigma: float) -> float:
        computed[sigma] = exact(sigma)
        return computed[sigma]

    guess = _crossing(coarse, target, (1.0, 2.0), _COARSE_TOLERANCE)
    # The search starts near the guess. If the guess is good, two exact epsilons are enough: one
    # sigma just above the guess, within the target, and one just below, outside it.
    start = (guess * (1 + _SAFE), 1 + 0.9 * RELATIVE_TOLERANCE)
    _crossing(recorded, target, start, RELATIVE_TOLERANCE)
    # The search may end at a sigma whose epsilon is above the target. Choose instead among all
    # sigmas whose exact epsilon was computed.
    enough = [sigma for sigma, epsilon in computed.items() if epsilon <= target]
    if not enough:
        raise DpfedError(_impossible(target, computed[max(computed)]))
    return min(enough)


def _crossing(
    epsilon_at: Callable[[float], float],
    target: float,
    start: tuple[float, float],
    tolerance: float,
) -> float:
    """Return the noise multiplier sigma at which epsilon equals the target, up to `tolerance`.

    If there is no such sigma, return the smallest or largest sigma that is allowed.

    epsilon_at  function from sigma to epsilon, decreasing
    start       (first sigma, factor): the search multiplies or divides sigma by growing powers
                of the factor until epsilon has crossed the target
    """
    lowest = math.log(_SMALLEST_SIGMA)
    highest = math.log(LARGEST_SIGMA)

    @cache
    def gap(log_sigma: float) -> float:
        epsilon = epsilon_at(math.exp(log_sigma))
        return math.log(max(epsilon, 1e-9 * target) / target) if math.isfinite(epsilon) else 50.0

    near, stride = map(math.log, start)
    near = min(max(near, lowest), highest)
    if gap(near) <= 0:
        stride = -stride
    while True:
        far = min(max(near + stride, lowest), highest)
        if far == near:
            return math.exp(near)
        if (gap(far) <= 0) != (gap(near) <= 0):
            return math.exp(brentq(gap, near, far, xtol=math.log1p(tolerance)))
        near = far
        stride *= 2


def _impossible(target: float, smallest: float) -> str:
    return (
        f"no noise up to sigma {show_setting(LARGEST_SIGMA)} reaches epsilon "
        f"{show_setting(target)}: the smallest epsilon possible for this plan is "
        f"{show_loss(smallest)}; take fewer rounds or local steps, a smaller batch or more "
        "records, or a larger delta."
    )

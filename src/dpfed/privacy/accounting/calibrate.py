"""The smallest noise that keeps a plan within a target epsilon.

The function that later reports epsilon also checks the returned sigma, so the target always holds.
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
# The epsilon of a smaller sigma is beyond any meaning.
_SMALLEST_SIGMA = 1e-2
_COARSE_TOLERANCE = 1e-5
# The first sigma to test is this far above the estimated root.
_SAFE = 2e-4


def calibrate_sigma(
    plan: Rounds, target_epsilon: float, delta: float, view: View = "server_worst"
) -> float:
    """Return the smallest sigma, within 1e-3 and at least 0.01, that keeps `view` at the target.

    The noise of `plan.step` is ignored. `plan.probability` is the participation S/N.
    """
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

    poisson = plan.step.sampling == "poisson"
    return smallest_sigma(exact, target_epsilon, coarse if poisson else exact)


def _check_target(target_epsilon: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise DpfedError(
            f"a target epsilon must be a number above 0, not {show_setting(target_epsilon)}."
        )


def _coarse_epsilon(plan: Rounds, target: float, delta: float) -> float:
    """Epsilon on a wider grid than the reported one: fast, a little too large, for searching only.

    RDP is near enough far above the target, where the grid of the target would be far too fine.
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
    """Return the smallest sigma, within 1e-3, with exact(sigma) <= target.

    Epsilon falls as sigma grows. `coarse` is a cheaper estimate of `exact`: it only chooses where
    `exact` is computed.
    """
    _check_target(target)
    computed: dict[float, float] = {}

    def recorded(sigma: float) -> float:
        computed[sigma] = exact(sigma)
        return computed[sigma]

    guess = _crossing(coarse, target, (1.0, 2.0), _COARSE_TOLERANCE)
    # A good guess needs two exact figures: a sigma just above the root, and one that fails below.
    start = (guess * (1 + _SAFE), 1 + 0.9 * RELATIVE_TOLERANCE)
    _crossing(recorded, target, start, RELATIVE_TOLERANCE)
    # A root search may end on either side of the target, so only computed figures decide.
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
    """Return a sigma within the relative tolerance of the one where epsilon crosses the target.

    `start` is a sigma and a factor. The search multiplies or divides the sigma by growing powers of
    the factor. Without a crossing it returns the smallest or largest sigma that is allowed.
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

"""The smallest noise that keeps a plan within a target epsilon.

The returned sigma is checked with the very function that later reports its epsilon, so the target is never passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.observers import Rounds, View, expected_rounds, view_epsilon
from dpfed.privacy.accounting.pld import (
    Term,
    canonical,
    check_delta,
    compose,
    interval_for,
    loss_spread,
    rough_epsilon,
    rounding,
)
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.published import show_loss, show_setting

RELATIVE_TOLERANCE = 1e-3
LARGEST_SIGMA = 1e4
_SMALLEST_SIGMA = 1e-2  # its epsilon is beyond any meaning, so no smaller one is looked for
_SAFE = 2e-4  # the candidate is placed this far above the estimated root, and the proof of minimality below it


def calibrate_sigma(
    *,
    rate: float,
    local_steps: int,
    rounds: int,
    target_epsilon: float,
    delta: float,
    participation: float = 1.0,
    view: View = "server_worst",
    sampling: Sampling = "poisson",
    batches: int = 1,
    releases: int = 1,
) -> float:
    """Smallest sigma, within 1e-3 of it and not below 0.01, whose epsilon in `view` is at most the target.

    The plan is `rounds` rounds of `local_steps` steps at sampling `rate`, with participation S/N.
    """
    check_delta(delta)
    _check_target(target_epsilon)
    if view not in ("server_worst", "server_expected", "third_party"):
        raise DpfedError(
            f"there is no view {view!r}; use server_worst, server_expected or third_party."
        )

    def plan(sigma: float) -> Rounds:
        try:
            step = Mechanism(sampling, rate, sigma, batches, releases)
        except ValueError as error:
            raise DpfedError(f"sigma cannot be calibrated: {error}.") from error
        return Rounds(step, local_steps, rounds, participation)

    def exact(sigma: float) -> float:
        part = plan(sigma)
        return view_epsilon(view, part.step, part.local_steps, part.rounds, part.probability, delta)

    def coarse(sigma: float) -> float:
        part = plan(sigma)
        taken = rounds if view == "server_worst" else expected_rounds(rounds, participation)
        if view != "third_party":
            part = Rounds(part.step, part.local_steps, taken)
        return _coarse_epsilon(part, target_epsilon, delta)

    checked = plan(1.0)  # refuses a bad plan before anything is computed
    if local_steps * rounds * checked.probability == 0:
        raise DpfedError(
            "a plan without any local step spends nothing, so there is no sigma to calibrate."
        )
    return smallest_sigma(exact, target_epsilon, coarse if sampling == "poisson" else exact)


def _check_target(target_epsilon: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise DpfedError(
            f"a target epsilon must be a number above 0, not {show_setting(target_epsilon)}."
        )


def _coarse_epsilon(part: Rounds, target: float, delta: float) -> float:
    """Epsilon on a wider grid than the reported one: fast, a little too large, and only used for searching.

    Far above the target RDP is near enough, and a grid made for the target would be out of all proportion there.
    """
    step = part.step
    steps = part.local_steps * step.batches
    terms = canonical(
        [Term(step.rate, step.effective_multiplier, steps, part.probability, part.rounds)]
    )
    rough = rough_epsilon(terms, delta)
    if rough > 20 * target + 2:
        return rough
    interval = max(
        interval_for(target, terms), min(8 * interval_for(target), loss_spread(terms) / 20)
    )
    return float(compose(terms, interval).get_epsilon_for_delta(delta - rounding(terms)))


def smallest_sigma(
    exact: Callable[[float], float], target: float, coarse: Callable[[float], float] | None = None
) -> float:
    """Smallest sigma within 1e-3 with exact(sigma) <= target, for an epsilon that falls as sigma grows.

    `coarse` is a cheaper estimate of `exact` that finds the neighbourhood; every decision is taken with `exact`.
    """
    _check_target(target)
    root = _root(coarse or exact, target)
    low, high = _SMALLEST_SIGMA, math.inf
    # Two exact figures are enough when the estimate is good: the candidate, and one just below it that fails.
    probe, stride = root * (1 + _SAFE), RELATIVE_TOLERANCE * 0.9
    while True:
        probe = min(max(probe, low), LARGEST_SIGMA)
        if exact(probe) <= target:
            high = probe
        elif probe == LARGEST_SIGMA:
            raise DpfedError(_impossible(target, exact(LARGEST_SIGMA)))
        else:
            low = probe
        if high <= low * (1 + RELATIVE_TOLERANCE):
            return high
        if high == math.inf:
            probe, stride = low * (1 + stride), 4 * stride
        elif low == _SMALLEST_SIGMA and high > low:
            probe, stride = high / (1 + stride), 4 * stride
        else:
            probe = math.sqrt(low * high)


def _impossible(target: float, smallest: float) -> str:
    return (
        f"no noise up to sigma {show_setting(LARGEST_SIGMA)} reaches epsilon {show_setting(target)}: "
        f"the smallest epsilon possible for this plan is {show_loss(smallest)}; "
        "take fewer rounds or local steps, a smaller batch or more records, or a larger delta."
    )


def _root(estimate: Callable[[float], float], target: float) -> float:
    """Where the estimate crosses the target, to 1e-4, by regula falsi (Illinois) on log epsilon over log sigma."""

    def gap(log_sigma: float) -> float:
        value = estimate(math.exp(log_sigma))
        return math.log(max(value, 1e-9 * target) / target) if math.isfinite(value) else 50.0

    bounds = math.log(_SMALLEST_SIGMA), math.log(LARGEST_SIGMA)
    left = right = 0.0
    left_gap = right_gap = gap(0.0)
    while (
        left_gap < 0 and left > bounds[0]
    ):  # too much noise: go down, by what epsilon ~ 1/sigma suggests
        right, right_gap = left, left_gap
        left = max(bounds[0], left - min(1.5, max(0.05, -0.8 * left_gap)))
        left_gap = gap(left)
    while right_gap > 0 and right < bounds[1]:
        left, left_gap = right, right_gap
        right = min(bounds[1], right + min(2.5, max(0.05, 1.1 * right_gap)))
        right_gap = gap(right)
    if left_gap <= 0 or right_gap >= 0:
        return math.exp(left if left_gap <= 0 else right)
    kept = 0
    while right - left > 1e-4 * 0.5 and left_gap - right_gap > 1e-5:
        middle = (left * -right_gap + right * left_gap) / (left_gap - right_gap)
        found = gap(middle)
        if abs(found) < 2e-5:
            return math.exp(middle)
        if found > 0:
            left, left_gap = middle, found
            right_gap = right_gap / 2 if kept > 0 else right_gap
            kept = 1
        else:
            right, right_gap = middle, found
            left_gap = left_gap / 2 if kept < 0 else left_gap
            kept = -1
    return math.exp(right)

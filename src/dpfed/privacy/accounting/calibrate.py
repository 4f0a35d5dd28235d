"""The smallest noise that keeps a plan within a target epsilon.

The returned sigma is checked with the very function that later reports its epsilon, so the target is never passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from scipy.optimize import brentq

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
_COARSE_TOLERANCE = 1e-5
# The first sigma to test is this far above the estimated root.
_SAFE = 2e-4


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
    """Return the smallest sigma, within 1e-3, with exact(sigma) <= target; epsilon falls with sigma.

    `coarse` is a cheaper estimate of `exact`. It only chooses where `exact` is computed.
    """
    _check_target(target)
    computed: dict[float, float] = {}

    def recorded(sigma: float) -> float:
        computed[sigma] = exact(sigma)
        return computed[sigma]

    guess = _crossing(coarse or exact, target, 1.0, 2.0, _COARSE_TOLERANCE)
    # A good guess needs two exact figures: a sigma just above the root, and one that fails below.
    _crossing(
        recorded, target, guess * (1 + _SAFE), 1 + 0.9 * RELATIVE_TOLERANCE, RELATIVE_TOLERANCE
    )
    # A root search may end on either side of the target, so only computed figures decide.
    enough = [sigma for sigma, epsilon in computed.items() if epsilon <= target]
    if not enough:
        raise DpfedError(_impossible(target, computed[max(computed)]))
    return min(enough)


def _crossing(
    epsilon_at: Callable[[float], float],
    target: float,
    start: float,
    factor: float,
    tolerance: float,
) -> float:
    """Return a sigma within the relative tolerance of the one where epsilon crosses the target.

    The search begins at `start` and multiplies or divides by growing powers of `factor`. Without a
    crossing it returns the smallest or largest sigma that is allowed.
    """
    lowest, highest = math.log(_SMALLEST_SIGMA), math.log(LARGEST_SIGMA)

    @cache
    def gap(log_sigma: float) -> float:
        epsilon = epsilon_at(math.exp(log_sigma))
        return math.log(max(epsilon, 1e-9 * target) / target) if math.isfinite(epsilon) else 50.0

    near = min(max(math.log(start), lowest), highest)
    stride = math.log(factor)
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
        f"no noise up to sigma {show_setting(LARGEST_SIGMA)} reaches epsilon {show_setting(target)}: "
        f"the smallest epsilon possible for this plan is {show_loss(smallest)}; "
        "take fewer rounds or local steps, a smaller batch or more records, or a larger delta."
    )

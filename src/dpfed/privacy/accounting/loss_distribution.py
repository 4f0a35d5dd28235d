"""Privacy-loss distributions of Poisson-subsampled Gaussian steps, composed on a grid.

Every approximation errs towards the larger epsilon: grids are pessimistic (connect the dots), and
noise too rare for the grid counts as an infinite loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as dpa_pld
from scipy import special

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.history import Floats, History, released
from dpfed.privacy.mechanism import Mechanism

Relation = Literal["add/remove one", "replace one"]

# Natural logarithm of the probability of one step's noise that counts as an infinite loss.
_LOG_TAIL = -50.0
# Above this epsilon the grid grows with epsilon, so that memory stays bounded.
_COARSEST_EPSILON = 200.0


class Term(NamedTuple):
    """`rounds` rounds of `steps` Poisson-subsampled Gaussian steps, each taken with `probability`.

    The adversary learns which rounds were taken; only delta is averaged over that choice.
    """

    rate: float
    multiplier: float
    steps: int
    probability: float = 1.0
    rounds: int = 1

    @classmethod
    def of(
        cls, kind: Mechanism, local_steps: int, probability: float = 1.0, rounds: int = 1
    ) -> Term:
        steps = local_steps * kind.batches
        return cls(kind.rate, kind.effective_multiplier, steps, probability, rounds)


def terms_of(history: History) -> tuple[Term, ...]:
    """Return the canonical terms of a Poisson history."""
    entries = released(history)
    if any(mechanism.sampling != "poisson" for mechanism, _ in entries):
        raise DpfedError(
            "privacy-loss distributions are used for Poisson sampling only; "
            "use rdp_epsilon instead."
        )
    return canonical(Term.of(mechanism, steps) for mechanism, steps in entries)


def canonical(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Join terms that differ only in a count, drop empty ones, and sort them.

    Rounds that are certainly taken are joined by their steps.
    """
    counts: dict[Term, int] = {}
    for term in terms:
        if term.probability == 1.0:
            key = term._replace(steps=1, rounds=1)
            count = term.steps * term.rounds
        else:
            key = term._replace(rounds=1)
            count = term.rounds
        if term.probability > 0 and term.steps > 0 and count > 0:
            counts[key] = counts.get(key, 0) + count
    joined = (
        key._replace(steps=count) if key.probability == 1.0 else key._replace(rounds=count)
        for key, count in counts.items()
    )
    return tuple(sorted(joined))


def _gaussian_residual(epsilons: Floats, multiplier: float) -> Floats:
    """Divergence of N(1, s^2) from N(0, s^2) less (1 - e^epsilon)_+.

    Balle and Wang 2018, Theorem 8.
    """
    at = np.abs(epsilons)
    half = 0.5 / multiplier
    shift = at * multiplier
    deltas = special.ndtr(half - shift) - np.exp(at + special.log_ndtr(-half - shift))
    return cast(Floats, np.maximum(deltas, 0) * np.exp(np.minimum(epsilons, 0)))


def _residual(losses: Floats, rate: float, multiplier: float) -> Floats:
    """delta(epsilon) of (1-q)N(0)+qN(1) against N(0), less (1 - e^epsilon)_+.

    Subsampling makes it q times the Gaussian's at log(1 + (e^epsilon - 1)/q), and 0 below log(1-q).
    Subtracting the large common part keeps full relative precision on fine grids.
    """
    with np.errstate(over="ignore"):
        inner = np.expm1(losses) / rate
    residual = np.zeros_like(losses)
    above = inner > -1
    # log1p(inner) without overflow at losses of several hundred
    unsampled_losses = np.where(
        losses[above] > 500,
        losses[above] - math.log(rate),
        np.log1p(np.minimum(inner[above], 1e300)),
    )
    residual[above] = rate * _gaussian_residual(unsampled_losses, multiplier)
    return residual


def _connect_dots(residual: Floats, lower: int, interval: float) -> Any:
    """Pessimistic connect-the-dots from residuals at grid points lower, lower+1, ...

    Doroshenko et al. 2022, Algorithm 1. Its second difference maps 1 - e^epsilon to 0, and the kink
    of (1 - e^epsilon)_+ to a unit mass at loss 0.
    """
    change = np.diff(residual)
    masses = np.empty_like(residual)
    masses[0] = change[0] / math.expm1(interval) - residual[0]
    masses[1:-1] = (change[1:] - change[:-1] * math.exp(interval)) / math.expm1(interval)
    masses[-1] = change[-1] / math.expm1(-interval)
    masses[-lower] += 1
    return pld_pmf.DensePLDPmf(interval, lower, np.maximum(masses, 0), float(residual[-1]), True)


def _loss_range(rate: float, multiplier: float, log_tail: float) -> tuple[float, float]:
    """Smallest and largest loss of one step, except for noise of probability e^log_tail."""
    reach = (0.5 - multiplier * special.ndtri_exp(log_tail - math.log(2))) / multiplier**2
    stay = math.log1p(-rate) if rate < 1 else -math.inf
    least = np.logaddexp(stay, math.log(rate) - reach)
    most = np.logaddexp(stay, math.log(rate) + reach)
    return float(least), float(most)


def _one_step(rate: float, multiplier: float, interval: float, log_tail: float) -> Any:
    """One Poisson-subsampled Gaussian step under add/remove.

    It equals dp_accounting's `from_gaussian_mechanism`, which computes one grid point at a time and
    loses digits in the add direction. The grids used here are too fine for that.
    """
    least, most = _loss_range(rate, multiplier, log_tail)
    lower = math.floor(least / interval)
    upper = math.ceil(most / interval)
    losses = np.arange(lower, upper + 1, dtype=np.float64) * interval
    residual = _residual(losses, rate, multiplier)
    remove = _connect_dots(residual, lower, interval)
    if rate == 1:
        return dpa_pld.PrivacyLossDistribution(remove)
    # Exchanging the two distributions turns r(epsilon) into e^epsilon r(-epsilon).
    with np.errstate(under="ignore"):
        swapped = np.exp(-losses) * residual
    return dpa_pld.PrivacyLossDistribution(remove, _connect_dots(swapped[::-1], -upper, interval))


def _one_step_replace(rate: float, multiplier: float, interval: float) -> Any:
    return dpa_pld.from_gaussian_mechanism(
        multiplier,
        sampling_prob=rate,
        value_discretization_interval=interval,
        neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE,
    )


# Each entry takes about 50 MB at a large epsilon.
@lru_cache(maxsize=2)
def compose(
    terms: tuple[Term, ...],
    interval: float,
    relation: Relation = "add/remove one",
    log_tail: float = _LOG_TAIL,
) -> Any:
    """The privacy-loss distribution of all `terms` together, on a grid of width `interval`.

    A round taken with probability p has the mixture (1-p) * nothing + p * its steps, since delta is
    linear in the distribution. T such rounds compose to sum_n Bin(n; T, p) delta_{nK}.
    """
    total: Any = None
    for term in terms:
        if relation == "replace one":
            part = _one_step_replace(term.rate, term.multiplier, interval)
        else:
            part = _one_step(term.rate, term.multiplier, interval, log_tail)
        part = part.self_compose(term.steps) if term.steps > 1 else part
        if term.probability < 1:
            part = part.compute_mixture(dpa_pld.identity(interval), term.probability)
        part = part.self_compose(term.rounds) if term.rounds > 1 else part
        total = part if total is None else total.compose(part)
    return total


def interval_for(epsilon: float, terms: tuple[Term, ...] = ()) -> float:
    """The grid width for an epsilon: min(1e-4, epsilon/2000), at most a fifth of the loss spread.

    It is rounded down to a power of two times 1e-4, so that results are reproducible. The width is
    at least 1e-6 and 1/500,000 of the largest loss of a step; above epsilon 200 it is epsilon/2e6.
    Rounding one step adds variance h^2/6: 0.7 % of the loss variance if h is a fifth of its root.
    """
    finest = max(
        [1e-6, *(_loss_range(term.rate, term.multiplier, _LOG_TAIL)[1] / 5e5 for term in terms)]
    )
    wanted = max(finest, min(1e-4, epsilon / 2000, loss_spread(terms) / 5))
    if epsilon > _COARSEST_EPSILON and wanted >= 1e-4:
        wanted = max(wanted, min(epsilon / 2e6, loss_spread(terms) / 5))
    return 1e-4 * 2.0 ** math.floor(math.log2(wanted / 1e-4) + 1e-9)


def loss_spread(terms: tuple[Term, ...]) -> float:
    """Root mean square privacy loss of one step to second order in q: q sqrt(e^(1/s^2) - 1)."""
    if not terms:
        return math.inf
    counts = [term.steps * term.rounds * term.probability for term in terms]
    squares = [term.rate**2 * math.expm1(min(50.0, term.multiplier**-2)) for term in terms]
    return math.sqrt(sum(c * s for c, s in zip(counts, squares, strict=True)) / sum(counts))


def rounding(steps: int) -> float:
    """An upper bound on the delta that the Fourier transforms of `steps` steps may have lost.

    It is ten times the largest error measured against exact formulas.
    """
    return 1e-13 + 1e-16 * steps


def steps_of(terms: tuple[Term, ...]) -> int:
    """Number of steps of all terms together."""
    return sum(term.steps * term.rounds for term in terms)

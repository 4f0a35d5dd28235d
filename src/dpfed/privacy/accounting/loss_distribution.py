"""Privacy-loss distributions of Poisson-subsampled Gaussian steps, composed on a grid of losses.

Every approximation makes epsilon larger, never smaller. The pessimistic connect-the-dots method
moves losses to grid points. Rare noise, whose loss lies outside the grid, counts as an infinite
loss.
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

# Natural logarithm of a probability. Noise in the tail with this total probability is not put on
# the grid: it counts as an infinite privacy loss.
_LOG_TAIL = -50.0
# For larger epsilons the grid is made coarser, in proportion to epsilon. This bounds the memory.
_COARSEST_EPSILON = 200.0


class Term(NamedTuple):
    """Several rounds of Poisson-subsampled Gaussian steps, one term of a composition.

    The client takes part in each round with the same probability. The adversary may learn in which
    rounds: delta is the average over this random choice.

    rate         sampling rate
    multiplier   effective noise multiplier
    steps        steps in a round
    probability  probability that the client takes part in a round
    rounds       number of rounds
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
    """Return a history as terms (rounds of equal steps), in the unique form of `canonical`.

    Raise DpfedError for fixed-size sampling, which has no privacy-loss distribution here.
    """
    entries = released(history)
    if any(mechanism.sampling != "poisson" for mechanism, _ in entries):
        raise DpfedError(
            "privacy-loss distributions are used for Poisson sampling only; "
            "use rdp_epsilon instead."
        )
    return canonical(Term.of(mechanism, steps) for mechanism, steps in entries)


def canonical(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Return equivalent terms (rounds of equal steps) in a unique form.

    Equal histories then have one cache entry.

    Terms that differ only in their number of rounds are joined, and terms without steps are
    dropped. Rounds with probability 1 are joined to one round of all their steps.
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
    """Return delta(epsilon) - max(0, 1 - e^epsilon) of the Gaussian mechanism at each epsilon.

    delta(epsilon) is the hockey-stick divergence of N(1, s^2) from N(0, s^2), where s is the noise
    multiplier. The formula is Theorem 8 of Balle and Wang 2018.
    """
    at = np.abs(epsilons)
    half = 0.5 / multiplier
    shift = at * multiplier
    deltas = special.ndtr(half - shift) - np.exp(at + special.log_ndtr(-half - shift))
    return cast(Floats, np.maximum(deltas, 0) * np.exp(np.minimum(epsilons, 0)))


def _residual(losses: Floats, rate: float, multiplier: float) -> Floats:
    """Return delta(epsilon) - max(0, 1 - e^epsilon) of one subsampled step at each loss.

    delta(epsilon) is the hockey-stick divergence of (1-q) N(0, s^2) + q N(1, s^2) from N(0, s^2).
    The result equals q times `_gaussian_residual` at log(1 + (e^epsilon - 1)/q). It is 0 for an
    epsilon below log(1-q). Subtracting max(0, 1 - e^epsilon), the larger part of delta, keeps full
    relative precision on fine grids.

    losses      the epsilons at which delta is needed
    rate        sampling rate q
    multiplier  noise multiplier s
    """
    with np.errstate(over="ignore"):
        inner = np.expm1(losses) / rate
    residual = np.zeros_like(losses)
    above = inner > -1
    # Compute log1p(inner) in a form that does not overflow for losses of several hundred.
    unsampled_losses = np.where(
        losses[above] > 500,
        losses[above] - math.log(rate),
        np.log1p(np.minimum(inner[above], 1e300)),
    )
    residual[above] = rate * _gaussian_residual(unsampled_losses, multiplier)
    return residual


def _connect_dots(residual: Floats, lower: int, interval: float) -> Any:
    """Return a discrete privacy-loss distribution by the connect-the-dots method.

    It has the given residuals at the grid points, and between them its delta is never too small.
    The masses are second differences of delta(epsilon): Algorithm 1 of Doroshenko et al. 2022.
    Here the algorithm gets the residual delta(epsilon) - max(0, 1 - e^epsilon). Adding a mass of 1
    at loss 0 restores the subtracted term.

    residual  residuals at the losses lower * interval, (lower + 1) * interval, ...
    """
    change = np.diff(residual)
    masses = np.empty_like(residual)
    masses[0] = change[0] / math.expm1(interval) - residual[0]
    masses[1:-1] = (change[1:] - change[:-1] * math.exp(interval)) / math.expm1(interval)
    masses[-1] = change[-1] / math.expm1(-interval)
    masses[-lower] += 1
    return pld_pmf.DensePLDPmf(interval, lower, np.maximum(masses, 0), float(residual[-1]), True)


def _loss_range(rate: float, multiplier: float, log_tail: float) -> tuple[float, float]:
    """Return the smallest and the largest privacy loss of one step, the range of its grid.

    The rarest noise, with probability e^log_tail, is ignored.
    """
    reach = (0.5 - multiplier * special.ndtri_exp(log_tail - math.log(2))) / multiplier**2
    stay = math.log1p(-rate) if rate < 1 else -math.inf
    least = np.logaddexp(stay, math.log(rate) - reach)
    most = np.logaddexp(stay, math.log(rate) + reach)
    return float(least), float(most)


def _one_step(rate: float, multiplier: float, interval: float, log_tail: float) -> Any:
    """Return the loss distribution of one subsampled step, for one added or removed record.

    The result agrees with dp_accounting's `from_gaussian_mechanism`, which is not used here for two
    reasons. It computes one grid point at a time, which is too slow for fine grids. It also loses
    precision for neighbours with one more record.
    """
    least, most = _loss_range(rate, multiplier, log_tail)
    lower = math.floor(least / interval)
    upper = math.ceil(most / interval)
    losses = np.arange(lower, upper + 1, dtype=np.float64) * interval
    residual = _residual(losses, rate, multiplier)
    remove = _connect_dots(residual, lower, interval)
    if rate == 1:
        return dpa_pld.PrivacyLossDistribution(remove)
    # Adding a record instead of removing one exchanges the two distributions. The residual
    # r(epsilon) then becomes e^epsilon r(-epsilon).
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


# The cache holds only two distributions, because one takes about 50 MB if epsilon is large.
@lru_cache(maxsize=2)
def compose(
    terms: tuple[Term, ...],
    interval: float,
    relation: Relation = "add/remove one",
    log_tail: float = _LOG_TAIL,
) -> Any:
    """Return the privacy-loss distribution of all steps in `terms`, composed.

    A round in which the client takes part with probability p has a mixture distribution: no loss
    with probability 1-p, and the loss of its steps with probability p. T such rounds of K steps
    have delta = sum_n Bin(n; T, p) delta_{nK}, because delta is linear in the distribution. Here
    delta_{nK} is the delta of nK steps.

    interval  grid width of the losses
    relation  how neighbouring data sets differ
    log_tail  natural logarithm of the noise probability that counts as an infinite loss
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
    """Return the width h of a grid of losses that is fine enough to compute this epsilon.

    - h is the smallest of 1e-4, epsilon/2000 and a fifth of `loss_spread`.
    - To limit memory, h is at least 1e-6 and at least 1/500,000 of the largest loss of a step. To
      limit memory for an epsilon above 200, h is at least epsilon/2e6.
    - h is rounded down to a power of two times 1e-4, so that results are reproducible.

    Moving the losses of one step to the grid adds a variance of h^2/6. If h is a fifth of the loss
    spread, this is 0.7 % of the variance of the losses.

    terms  the steps whose losses are put on the grid
    """
    finest = max(
        [1e-6, *(_loss_range(term.rate, term.multiplier, _LOG_TAIL)[1] / 5e5 for term in terms)]
    )
    wanted = max(finest, min(1e-4, epsilon / 2000, loss_spread(terms) / 5))
    if epsilon > _COARSEST_EPSILON and wanted >= 1e-4:
        wanted = max(wanted, min(epsilon / 2e6, loss_spread(terms) / 5))
    return 1e-4 * 2.0 ** math.floor(math.log2(wanted / 1e-4) + 1e-9)


def loss_spread(terms: tuple[Term, ...]) -> float:
    """Return the root mean square of the privacy loss of one step, averaged over all steps.

    For one step it is approximately q sqrt(e^(1/s^2) - 1), for rate q and noise multiplier s.
    """
    if not terms:
        return math.inf
    counts = [term.steps * term.rounds * term.probability for term in terms]
    squares = [term.rate**2 * math.expm1(min(50.0, term.multiplier**-2)) for term in terms]
    return math.sqrt(sum(c * s for c, s in zip(counts, squares, strict=True)) / sum(counts))


def rounding(steps: int) -> float:
    """Return an upper bound on the error in delta after composing `steps` steps.

    The error comes from floating-point rounding in Fourier transforms. The bound is ten times the
    largest error that was measured against exact formulas.
    """
    return 1e-13 + 1e-16 * steps


def steps_of(terms: tuple[Term, ...]) -> int:
    """Return the number of steps in all terms (groups of equal rounds) together."""
    return sum(term.steps * term.rounds for term in terms)

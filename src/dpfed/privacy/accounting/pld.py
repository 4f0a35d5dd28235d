"""What a history of noised steps costs: epsilon at a delta, and the whole curve behind it.

Reported numbers follow SPEC 6.1. For Poisson sampling: Google's privacy-loss distributions (`dp_accounting`),
pessimistic, connect-the-dots, add/remove one record, with Renyi DP beside it as a check that must not be smaller. For
fixed-size sampling: Renyi DP under replace-one. Every approximation here errs towards the larger epsilon.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import dp_accounting as dpa
import numpy as np
import numpy.typing as npt
from dp_accounting import rdp as dpa_rdp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as dpa_pld
from dp_accounting.rdp import rdp_privacy_accountant as dpa_rdp_curve
from scipy import special

from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_delta, show_loss, show_setting

History = Sequence[tuple[Mechanism, int]]
"""What one client released: (mechanism, number of local steps) in any order; rates and noise may change between."""

Relation = Literal["add/remove one", "replace one"]
Repeats = Literal["fixed", "geometric", "logarithmic", "poisson"]
Floats = npt.NDArray[np.float64]

SMALLEST_DELTA = (
    1e-10  # below it, rounding in the Fourier transforms is no longer small beside delta
)
_LOG_TAIL = -50.0  # ln of the probability of one step's noise that is counted as an infinite loss
_COARSEST_EPSILON = 200.0  # above it the grid grows with epsilon, so that memory stays bounded
_RDP_ROUNDING = 2e-16  # allowance for rounding in one step's Renyi divergence; it errs upwards
_RDP_SLACK = 1e-6  # how far, relatively, the pessimistic grid may push PLD above RDP before it is called an error


class AccountingError(RuntimeError):
    """Two accountants contradict each other: a defect of this program, never of its user."""


@dataclass(frozen=True)
class Epsilon:
    """An epsilon with everything that must stand beside it."""

    value: float
    delta: float
    accountant: str
    adjacency: str
    sampling: str

    def label(self) -> str:
        """What the number means, for printing next to it."""
        return f"delta {show_delta(self.delta)}, {self.accountant}, {self.adjacency} record, {self.sampling} sampling"

    def __str__(self) -> str:
        return f"epsilon {show_loss(self.value)} ({self.label()})"


class Term(NamedTuple):
    """`rounds` rounds of `steps` Poisson-subsampled Gaussian steps, each round taken with `probability`.

    Whether a round was taken is given away to the adversary; only its delta is averaged (SPEC 6.2 b).
    """

    rate: float
    multiplier: float
    steps: int
    probability: float = 1.0
    rounds: int = 1


# ----------------------------------------------------------------------------------------------------- checks


def check_delta(delta: float) -> None:
    """Refuse a delta that is none, or one that double precision cannot certify."""
    if not 0 < delta < 1:
        raise DpfedError(f"delta must lie strictly between 0 and 1, not {show_setting(delta)}.")
    if delta < SMALLEST_DELTA:
        raise DpfedError(
            f"delta {show_setting(delta)} is below {show_setting(SMALLEST_DELTA)}, "
            "the smallest this accountant can certify."
        )


def _spent(history: History) -> list[tuple[Mechanism, int]]:
    """The entries that released something, all under one adjacency."""
    for _, steps in history:
        if steps < 0:
            raise DpfedError(f"a history cannot hold {steps} steps.")
    spent = [(mechanism, steps) for mechanism, steps in history if steps > 0]
    if len({mechanism.sampling for mechanism, _ in spent}) > 1:
        raise DpfedError(
            "a history mixes Poisson and fixed-size sampling, which are accounted for under different adjacencies, "
            "so no single epsilon covers it."
        )
    return spent


def terms_of(history: History) -> tuple[Term, ...]:
    """The canonical form of a Poisson history: equal steps are joined, and the order does not matter."""
    return canonical(
        Term(mechanism.rate, mechanism.effective_multiplier, steps * mechanism.batches)
        for mechanism, steps in _poisson_only(_spent(history))
    )


def canonical(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Join terms that only differ in a count; a round that is certain is the same as its steps alone."""
    counts: dict[Term, int] = {}
    for term in terms:
        if term.probability == 1.0:
            key, count = term._replace(steps=1, rounds=1), term.steps * term.rounds
        else:
            key, count = term._replace(rounds=1), term.rounds
        if term.probability > 0 and term.steps > 0 and count > 0:
            counts[key] = counts.get(key, 0) + count
    joined = (
        key._replace(steps=count) if key.probability == 1.0 else key._replace(rounds=count)
        for key, count in counts.items()
    )
    return tuple(sorted(joined))


def _poisson_only(spent: list[tuple[Mechanism, int]]) -> list[tuple[Mechanism, int]]:
    if any(mechanism.sampling != "poisson" for mechanism, _ in spent):
        raise DpfedError(
            "privacy-loss distributions are used for Poisson sampling only; use rdp_epsilon instead."
        )
    return spent


# ----------------------------------------------------------------------------- privacy-loss distributions (PLD)


def _gaussian_residual(epsilons: Floats, multiplier: float) -> Floats:
    """Divergence of N(1, s^2) from N(0, s^2) (Balle and Wang 2018, Theorem 8) less (1 - e^epsilon)_+."""
    at = np.abs(epsilons)
    half, shift = 0.5 / multiplier, at * multiplier
    deltas = special.ndtr(half - shift) - np.exp(at + special.log_ndtr(-half - shift))
    return cast(Floats, np.maximum(deltas, 0) * np.exp(np.minimum(epsilons, 0)))


def _residual(losses: Floats, rate: float, multiplier: float) -> Floats:
    """delta(epsilon) of (1-q)N(0)+qN(1) against N(0), less the (1 - e^epsilon)_+ of no release at all.

    Subsampling makes it q times the Gaussian's at log(1 + (e^epsilon - 1)/q), and 0 below log(1-q). Leaving out the
    large common part keeps full relative precision, without which rounding would fill the fine grids with false mass.
    """
    with np.errstate(over="ignore"):
        inner = np.expm1(losses) / rate
    residual = np.zeros_like(losses)
    above = inner > -1
    # log1p(inner) without overflow at losses of several hundred
    plain = np.where(
        losses[above] > 500,
        losses[above] - math.log(rate),
        np.log1p(np.minimum(inner[above], 1e300)),
    )
    residual[above] = rate * _gaussian_residual(plain, multiplier)
    return residual


def _connect_dots(residual: Floats, lower: int, interval: float) -> Any:
    """Pessimistic connect-the-dots (Doroshenko et al. 2022, Algorithm 1) from residuals at lower, lower+1, ...

    Its second difference sends 1 - e^epsilon to 0 and the kink of (1 - e^epsilon)_+ to a unit mass at loss 0.
    """
    change = np.diff(residual)
    masses = np.empty_like(residual)
    masses[0] = change[0] / math.expm1(interval) - residual[0]
    masses[1:-1] = (change[1:] - change[:-1] * math.exp(interval)) / math.expm1(interval)
    masses[-1] = change[-1] / math.expm1(-interval)
    masses[-lower] += 1
    return pld_pmf.DensePLDPmf(interval, lower, np.maximum(masses, 0), float(residual[-1]), True)


def _loss_range(rate: float, multiplier: float, log_tail: float) -> tuple[float, float]:
    """Smallest and largest loss of removing a record from one step, but for noise of probability e^log_tail."""
    reach = (0.5 - multiplier * special.ndtri_exp(log_tail - math.log(2))) / multiplier**2
    stay = math.log1p(-rate) if rate < 1 else -math.inf
    return float(np.logaddexp(stay, math.log(rate) - reach)), float(
        np.logaddexp(stay, math.log(rate) + reach)
    )


def _one_step(rate: float, multiplier: float, interval: float, log_tail: float) -> Any:
    """One Poisson-subsampled Gaussian step under add/remove.

    It equals dp_accounting's `from_gaussian_mechanism` (a test holds them together), which evaluates one point of the
    grid at a time and loses digits in the add direction; the grids needed here are too fine for either.
    """
    least, most = _loss_range(rate, multiplier, log_tail)
    lower, upper = math.floor(least / interval), math.ceil(most / interval)
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


@lru_cache(maxsize=2)  # of the order of 50 MB each at a large epsilon
def compose(
    terms: tuple[Term, ...],
    interval: float,
    relation: Relation = "add/remove one",
    log_tail: float = _LOG_TAIL,
) -> Any:
    """The privacy-loss distribution of all `terms` together on a grid of width `interval`.

    A round taken with probability p has the mixture (1-p) * nothing + p * its steps as its loss distribution, because
    delta is linear in that distribution; composing T such rounds is exactly sum_n Bin(n; T, p) delta_{nK}.
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
    """The grid width SPEC 6.1 asks for, rounded down to a power of two times 1e-4 so that results are reproducible.

    The rule is min(1e-4, epsilon/2000). Outside 0.002..200 it would cost memory for digits nobody reads: below, the
    grid stays at 1e-6, or at 1/500,000 of the largest loss of one step; above, it is epsilon/2e6. All of it remains
    pessimistic. Very many very small steps need more: each rounding adds variance h^2/6, which stays below 0.7 % of
    the variance of one step's loss when h is a fifth of it.
    """
    finest = max(
        [1e-6, *(_loss_range(term.rate, term.multiplier, _LOG_TAIL)[1] / 5e5 for term in terms)]
    )
    wanted = max(finest, min(1e-4, epsilon / 2000, loss_spread(terms) / 5))
    if epsilon > _COARSEST_EPSILON and wanted >= 1e-4:
        wanted = max(wanted, min(epsilon / 2e6, loss_spread(terms) / 5))
    return 1e-4 * 2.0 ** math.floor(math.log2(wanted / 1e-4) + 1e-9)


def loss_spread(terms: tuple[Term, ...]) -> float:
    """Root mean square privacy loss of one step, to second order in the rate: q sqrt(e^(1/s^2) - 1)."""
    counts = [term.steps * term.rounds * term.probability for term in terms]
    squares = [term.rate**2 * math.expm1(min(50.0, term.multiplier**-2)) for term in terms]
    return (
        math.sqrt(sum(c * s for c, s in zip(counts, squares, strict=True)) / sum(counts))
        if terms
        else math.inf
    )


@lru_cache(maxsize=4096)
def epsilon_of_terms(
    terms: tuple[Term, ...], delta: float, relation: Relation = "add/remove one"
) -> float:
    """Smallest epsilon with delta(epsilon) <= delta, on a grid at least as fine as `interval_for` that epsilon."""
    if not terms:
        return 0.0
    if any(term.multiplier == 0 for term in terms):
        return math.inf
    interval = max(
        1e-4, interval_for(rough_epsilon(terms, delta))
    )  # RDP tells nothing about a small epsilon
    while True:
        value = float(
            compose(terms, interval, relation).get_epsilon_for_delta(delta - rounding(terms))
        )
        wanted = interval_for(value, terms)
        if value == 0 or not math.isfinite(value) or interval <= wanted:  # 0 cannot become smaller
            return value
        interval = wanted


def rounding(terms: tuple[Term, ...]) -> float:
    """What the Fourier transforms may have taken from a delta: ten times what was measured against exact formulas."""
    return 1e-13 + 1e-16 * sum(term.steps * term.rounds for term in terms)


def rough_epsilon(terms: tuple[Term, ...], delta: float) -> float:
    """An RDP estimate that only chooses the first grid: one far too fine for a huge epsilon would exhaust memory."""
    curve = sum(
        (t.steps * t.rounds * _rdp_step("poisson", t.rate, t.multiplier) for t in terms),
        np.zeros(len(_orders())),
    )
    return min(_rdp_to_epsilon(curve, delta), 1e12)


def pld_epsilon(history: History, delta: float) -> float:
    """Epsilon of a Poisson history under add/remove by PLD; infinite without noise, 0 when nothing was released."""
    check_delta(delta)
    return epsilon_of_terms(terms_of(history), delta)


def replace_one_epsilon(history: History, delta: float) -> float:
    """Epsilon when one record is replaced by another (both of norm C), as dp_accounting's REPLACE_ONE has it.

    For Poisson histories it is an extra figure beside the reported one; fixed-size histories are replace-one already.
    """
    check_delta(delta)
    spent = _spent(history)
    if any(mechanism.sampling == "fixed_wor" for mechanism, _ in spent):
        return rdp_epsilon(spent, delta)
    return epsilon_of_terms(terms_of(spent), delta, "replace one")


# --------------------------------------------------------------------------------------------- Renyi DP (RDP)


def _orders() -> Floats:
    return np.asarray(dpa_rdp_curve.DEFAULT_RDP_ORDERS, dtype=np.float64)


@contextlib.contextmanager
def _orders_may_fail() -> Iterator[None]:
    """Silence dp_accounting's note that it leaves out orders whose series did not converge: RDP only grows by it."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _rdp_event(sampling: str, rate: float, multiplier: float) -> dpa.DpEvent:
    gaussian = dpa.GaussianDpEvent(multiplier)
    if sampling == "poisson":
        return dpa.PoissonSampledDpEvent(rate, gaussian)
    # The event takes two integers; the rate is rounded up to a multiple of 1e-12.
    return dpa.SampledWithoutReplacementDpEvent(
        10**12, min(10**12, math.ceil(rate * 10**12)), gaussian
    )


def _rdp_accountant(sampling: str) -> Any:
    relation = dpa.NeighboringRelation
    return dpa_rdp.RdpAccountant(
        orders=_orders(),
        neighboring_relation=relation.ADD_OR_REMOVE_ONE
        if sampling == "poisson"
        else relation.REPLACE_ONE,
    )


@lru_cache(maxsize=256)
def _rdp_step(sampling: str, rate: float, multiplier: float) -> Floats:
    """Renyi divergence of one step at every order, never below the truth by rounding."""
    orders = _orders()
    if multiplier == 0:
        return np.full(len(orders), math.inf)
    accountant = _rdp_accountant(sampling)
    with _orders_may_fail():
        accountant.compose(_rdp_event(sampling, rate, multiplier))
    return cast(
        Floats, np.maximum(accountant.rdp, 0) + _RDP_ROUNDING * (orders + 10) / (orders - 1)
    )


def rdp_curve(history: History) -> Floats:
    """Renyi divergence of a history at dp_accounting's default orders."""
    curves = (
        steps
        * mechanism.batches
        * _rdp_step(mechanism.sampling, mechanism.rate, mechanism.effective_multiplier)
        for mechanism, steps in _spent(history)
    )
    return sum(curves, np.zeros(len(_orders())))


def mixed_rdp_curve(curve: Floats, probability: float, rounds: int) -> Floats:
    """Renyi divergence of `rounds` rounds, each taken with `probability`, participation given away."""
    factor = _orders() - 1
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp(np.log1p(-probability), np.log(probability) + factor * curve)
    return cast(Floats, rounds * np.maximum(mixed, 0) / factor)


def _rdp_to_epsilon(curve: Floats, delta: float) -> float:
    return float(dpa_rdp_curve.compute_epsilon(_orders(), curve, delta)[0])


def rdp_curve_epsilon(curve: Floats, delta: float) -> float:
    """Epsilon that a Renyi curve at the default orders gives; infinite where no order is finite."""
    check_delta(delta)
    return _rdp_to_epsilon(curve, delta)


def rdp_epsilon(history: History, delta: float) -> float:
    """Epsilon by Renyi DP: Mironov 2019 for Poisson (add/remove), Wang et al. Theorem 9 for fixed size (replace-one).

    For fixed-size sampling the multiplier is taken against the sensitivity 2C of a replacement (SPEC 6.4).
    """
    check_delta(delta)
    return _rdp_to_epsilon(rdp_curve(history), delta) if _spent(history) else 0.0


# -------------------------------------------------------------------------------------- the reported statements


def check_against_rdp(value: float, bound: float) -> None:
    """Stop when PLD exceeds RDP: both bound the same truth and RDP is the looser, so one of them is broken."""
    if value > bound * (1 + _RDP_SLACK) + 1e-9:
        raise AccountingError(
            f"the PLD epsilon {value!r} exceeds its RDP check {bound!r}; neither may be used."
        )


def epsilon(history: History, delta: float) -> Epsilon:
    """The number to report: PLD checked by RDP for Poisson sampling, RDP under replace-one for fixed size."""
    check_delta(delta)
    spent = _spent(history)
    bound = rdp_epsilon(spent, delta)
    if spent and spent[0][0].sampling == "fixed_wor":
        return Epsilon(bound, delta, "RDP", spent[0][0].adjacency, "fixed_wor")
    value = pld_epsilon(spent, delta)
    check_against_rdp(value, bound)
    return Epsilon(value, delta, "PLD", "add/remove one", "poisson")


def delta_curve(history: History, epsilons: Sequence[float]) -> list[float]:
    """delta(epsilon) of the history at each given epsilon >= 0, never below the truth."""
    if any(not at >= 0 for at in epsilons):
        raise DpfedError("delta(epsilon) is asked for at epsilons of 0 or more.")
    spent = _spent(history)
    if not spent:
        return [0.0 for _ in epsilons]
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in spent):
        return [1.0 for _ in epsilons]
    if spent[0][0].sampling == "fixed_wor":
        curve = rdp_curve(spent)
        return [float(dpa_rdp_curve.compute_delta(_orders(), curve, at)[0]) for at in epsilons]
    terms = terms_of(spent)
    distribution, extra = _for_deltas(terms), rounding(terms)
    return [
        min(1.0, max(0.0, float(distribution.get_delta_for_epsilon(float(at)))) + extra)
        for at in epsilons
    ]


def _for_deltas(terms: tuple[Term, ...]) -> Any:
    """A loss distribution whose grid is fine against the spread of the losses, of which delta(0) is the measure."""
    interval = interval_for(rough_epsilon(terms, 1e-5), terms)
    while True:
        distribution = compose(terms, interval)
        wanted = interval_for(4 * float(distribution.get_delta_for_epsilon(0.0)), terms)
        if (
            interval <= wanted or interval > 1e-4
        ):  # above 1e-4 epsilon is over 200, and delta(0) is 1
            return distribution
        interval = wanted


def delta_at(history: History, at: float) -> float:
    """delta(epsilon) of the history at one epsilon."""
    return delta_curve(history, [at])[0]


def membership_advantage(history: History) -> float:
    """Largest true-positive minus false-positive rate any membership test of one record can reach.

    It is delta at epsilon 0, the total variation distance between the neighbouring outputs. For fixed-size sampling
    the neighbour replaces the record, so the test is "this record or that one".
    """
    return delta_at(history, 0.0)


def tuning_epsilon(history: History, delta: float, runs: int, repeats: Repeats = "fixed") -> float:
    """Epsilon of choosing the best of several runs, each with this `history`, on the same data.

    "fixed": at most `runs` runs were made, chosen in any way. It is plain composition of all of them, so every run
    may even be published. This is the right figure for a number of runs that was not drawn at random.
    "geometric", "logarithmic", "poisson": Papernot and Steinke 2022 (Theorems 2 and 6), by RDP. They hold only if the
    number of runs was drawn from that distribution with mean `runs` before the first run, independently of the data,
    and nothing of the other runs is ever shown. For Poisson the draw may be zero, and then nothing is released.
    In all of them the choice may look at released models and at data outside the private set; a score computed on
    private records has to be part of what each run is charged for.
    """
    check_delta(delta)
    if runs < 1:
        raise DpfedError(f"the number of tuning runs must be at least 1, not {runs}.")
    spent = _spent(history)
    if not spent:
        return 0.0
    if repeats == "fixed":
        return epsilon([(mechanism, steps * runs) for mechanism, steps in spent], delta).value
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in spent):
        return math.inf
    shape = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}[repeats]
    events = [
        dpa.SelfComposedDpEvent(
            _rdp_event(m.sampling, m.rate, m.effective_multiplier), steps * m.batches
        )
        for m, steps in spent
    ]
    accountant = _rdp_accountant(spent[0][0].sampling)
    with _orders_may_fail():
        accountant.compose(RepeatAndSelectDpEvent(dpa.ComposedDpEvent(events), float(runs), shape))
    return float(accountant.get_epsilon(delta))

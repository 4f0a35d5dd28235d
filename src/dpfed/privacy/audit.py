"""Statistics of a privacy audit: lower bounds on epsilon, and tests of batches and noise.

A canary is a record for which a fair coin decides if it is in the data. The audit guesses the coins
from the released values. If more guesses are correct than (epsilon, delta)-DP allows, the claimed
epsilon is disproved. The lower bounds assume nothing about noise, clipping or sampling. Each lower
bound exceeds the true epsilon with a probability of at most 1 - confidence.

Many canaries in one run are evaluated by the method of Steinke, Nasr and Jagielski 2023 ("Privacy
Auditing with One (1) Training Run"). Independent runs with one canary each are evaluated with
Clopper-Pearson intervals. Statistical tests also check that batches and noise have the probability
distributions that the accountant assumes. The tests find faults that no bound on epsilon finds,
such as batches from shuffled data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_loss, show_lower_bound, show_setting
from dpfed.privacy.sampling import fixed_size

# Shares of the canaries for which the audit guesses the result of the coin. The shares are
# constants, because shares that depend on the scores would make the bound invalid.
GUESSED_SHARES = (1 / 32, 1 / 8, 1 / 2, 1)
# Batches or noise are reported as wrong below this p-value. It is very small, because false alarms
# cost trust and real faults give far smaller p-values.
LAW_LEVEL = 1e-6
# Largest lower bound that is searched; no audit of a feasible size can prove a larger one.
MAX_EPSILON = 64.0


@dataclass(frozen=True)
class Report:
    """Result of one audit.

    audit       many canaries in one run, or one canary in each of many draws
    seen        values that the audit used: "oracle" for the oracle's releases, "server" for the
                messages that the server receives
    lower       lower bound on epsilon
    claimed     the claimed epsilon that is tested: the largest over all clients
    delta       delta for which `lower` and `claimed` hold
    confidence  probability that `lower` does not exceed the true epsilon
    canaries    number of canaries
    clients     number of clients
    steps       local steps of each client
    """

    audit: Literal["one run", "many draws"]
    seen: Literal["oracle", "server"]
    lower: float
    claimed: float
    delta: float
    confidence: float
    canaries: int
    clients: int
    steps: int

    @property
    def disproved(self) -> bool:
        return self.lower > self.claimed

    @property
    def verdict(self) -> str:
        return "DISPROVES the claim" if self.disproved else "consistent with the claim"


@dataclass(frozen=True)
class Law:
    """Result of testing if batches or noise have the distribution that the accountant assumes.

    what   the tested values: "batches" or "noise"
    tests  the p-value of each test, by the name of the test
    """

    what: Literal["batches", "noise"]
    tests: dict[str, float]

    @property
    def p_value(self) -> float:
        """The p-value of all tests together, with Bonferroni's correction."""
        return min(1.0, len(self.tests) * min(self.tests.values()))

    @property
    def broken(self) -> bool:
        return self.p_value < LAW_LEVEL

    @property
    def verdict(self) -> str:
        if not self.broken:
            return "as accounted"
        return f"NOT as accounted: {min(self.tests, key=self.tests.__getitem__)}"


# ------------------------------------------------------------------ many canaries in one run


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return an upper bound on the probability of at least `correct` correct guesses.

    The bound holds for every (epsilon, delta)-DP mechanism. By Theorem 5.2 of Steinke et al. it is
    beta + 2 m delta alpha, for v correct guesses among r guesses on m canaries:
    W ~ Binomial(r, e^eps/(1+e^eps)), beta = P[W >= v], alpha = max_i P[v > W >= v-i]/i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} correct of {guesses} guesses on {canaries} canaries cannot be")
    if correct == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, accuracy))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return the largest epsilon that `correct` of `guesses` guesses disprove; 0 if none.

    All smaller epsilons are then disproved too, because (epsilon, delta)-DP implies
    (epsilon', delta)-DP for every larger epsilon'. Therefore the result is a lower bound.
    """

    def disproved(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    if not disproved(0.0):
        return 0.0
    low = 0.0
    high = MAX_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        if disproved(middle):
            low = middle
        else:
            high = middle
    return low


def one_run_bound(scores: np.ndarray, coins: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon from one run with many canaries.

    scores  one number per canary; a high score speaks for "in the data"
    coins   the truth: True for each canary that is in the data

    The audit guesses "in" for the canaries with the highest scores. It guesses "out" for equally
    many canaries with the lowest scores. It tries several numbers of guesses and returns the
    largest bound. Each number of guesses gets an equal share of the error probability
    1 - confidence, so the result has the stated confidence.
    """
    ranked = coins.reshape(-1).astype(bool)[np.argsort(scores.reshape(-1), kind="stable")]
    count = len(ranked)
    sides = {max(1, round(share * count / 2)) for share in GUESSED_SHARES if count >= 2}
    bounds = [0.0]
    for side in sorted(side for side in sides if 2 * side <= count):
        correct = int(ranked[-side:].sum()) + side - int(ranked[:side].sum())
        confidence_each = 1 - (1 - confidence) / len(sides)
        bounds.append(one_run_epsilon(count, 2 * side, correct, delta, confidence_each))
    return max(bounds)


# ------------------------------------------------------------------ one canary in each of many runs


def many_draws_bound(
    scores: np.ndarray, coins: np.ndarray, delta: float, confidence: float
) -> float:
    """Return a lower bound on epsilon from independent runs with one canary each.

    scores  one number per run; a high score speaks for "in the data"
    coins   the truth: True for each run whose canary is in the data

    DP implies e^eps >= (P[R|in] - delta)/P[R|out] for every set R of scores. The inequality also
    holds with "in" and "out" exchanged. R is the set of scores on one side of a threshold. The
    first half of the runs chooses R, and the second half bounds both probabilities by
    Clopper-Pearson.
    """
    scores = scores.reshape(-1)
    coins = coins.reshape(-1).astype(bool)
    half = len(scores) // 2
    choosing = (scores[:half][coins[:half]], scores[:half][~coins[:half]])
    testing = (scores[half:][coins[half:]], scores[half:][~coins[half:]])
    if not all(len(part) for part in (*choosing, *testing)):
        return 0.0
    # Put thresholds between the distinct values: runs without noise have many equal scores.
    values = np.unique(scores[:half])
    cuts = np.concatenate([values[:1] - 1, (values[1:] + values[:-1]) / 2, values[-1:] + 1])
    high = _log_ratio_bound(*choosing, cuts, delta, confidence)
    low = _log_ratio_bound(-choosing[1], -choosing[0], -cuts, delta, confidence)
    if high.max() >= low.max():
        bound = _log_ratio_bound(*testing, cuts[[high.argmax()]], delta, confidence)
    else:
        bound = _log_ratio_bound(-testing[1], -testing[0], -cuts[[low.argmax()]], delta, confidence)
    return max(0.0, float(bound[0]))


def _log_ratio_bound(
    ins: np.ndarray, outs: np.ndarray, cuts: np.ndarray, delta: float, confidence: float
) -> np.ndarray:
    """Return for each cut a lower bound on log((P[in > cut] - delta) / P[out > cut]).

    The bound is -inf where the numerator may be zero.

    ins   scores of the runs with the canary
    outs  scores of the runs without the canary
    cuts  the thresholds
    """
    hits = len(ins) - np.searchsorted(np.sort(ins), cuts, side="right")
    false = len(outs) - np.searchsorted(np.sort(outs), cuts, side="right")
    error = (1 - confidence) / 2
    # The Clopper-Pearson formulas fail if `hits` is 0 or if `false` is len(outs). The limits are
    # then 0 and 1, which the two np.where calls set.
    at_least = stats.beta.ppf(error, np.maximum(hits, 1), len(ins) - hits + 1)
    at_most = stats.beta.ppf(1 - error, false + 1, np.maximum(len(outs) - false, 1))
    at_least = np.where(hits > 0, at_least, 0.0)
    at_most = np.where(false < len(outs), at_most, 1.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(at_least - delta, 0.0)) - np.log(at_most))


def log_ratio(shift: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """Return the score of each batch: the log-likelihood ratio of "canary in" to "canary out".

    The likelihoods assume that the mechanism works as claimed. The audit's lower bounds are valid
    for any score. This score separates "in" from "out" nearly as well as possible.

    shift  <released sum, canary direction>/C of each batch, averaged over its releases. The value
           is about 1 if the batch has the canary, and about 0 if not. With replace-one adjacency,
           it is about -1 if the batch has the record that replaces the canary.
    """
    precision = (mechanism.noise_multiplier**2 / mechanism.releases) ** -1
    with np.errstate(divide="ignore"):
        log_absent = np.log1p(-mechanism.rate)
    log_present = math.log(mechanism.rate)
    ratio = np.logaddexp(log_absent, log_present + (shift - 0.5) * precision)
    if mechanism.adjacency != "add/remove one":
        ratio = ratio - np.logaddexp(log_absent, log_present + (-shift - 0.5) * precision)
    return np.asarray(ratio)


# ------------------------------------------------------------------ tests of batches and noise


def batch_law(mechanism: Mechanism, included: np.ndarray) -> Law:
    """Test if drawn batches have the distribution of the mechanism's sampling; return the p-values.

    included  `[clients, steps, units]` True if the unit was in the client's batch at this step

    Four properties are tested: the batch sizes, how often each unit was drawn, the overlap of
    consecutive batches, and the overlap of two clients' batches. Batches from shuffled data contain
    every unit equally often, so the test of how often each unit was drawn finds them.
    """
    clients, steps, units = included.shape
    sizes = included.sum(2).reshape(-1).astype(float)
    counts = included.sum(1).astype(float)
    if mechanism.sampling == "poisson":
        q = mechanism.rate
        size_variance = units * q * (1 - q)
        tests = {
            "mean batch size": _binomial(sizes.sum(), included.size, q),
            "spread of batch sizes": _spread(
                sizes, units * q, size_variance, len(sizes), _excess(units, q)
            ),
        }
        variance = steps * q * (1 - q)
        freedom = counts.size
        pairs = units
        overlap = q**2
    else:
        b = fixed_size(mechanism.rate, units)
        q = b / units
        tests = {"batch size": float(np.all(sizes == b))}
        variance = steps * q * (1 - q) * units / max(1, units - 1)
        freedom = clients * (units - 1)
        # The overlap is hypergeometric. The test uses the binomial distribution with equal mean.
        # The binomial variance is larger, so the test gives no additional false alarms.
        pairs = b
        overlap = q
    tests["how often each record is drawn"] = _spread(
        counts, steps * q, variance, freedom, _excess(steps, q)
    )
    for name, axis in (("consecutive", 1), ("two clients'", 0)):
        even, odd = _neighbours(included, axis)
        tests[f"overlap of {name} batches"] = _binomial(
            (even & odd).sum(), even.size // units * pairs, overlap
        )
    return Law("batches", tests)


def noise_law(noise: np.ndarray) -> Law:
    """Test if noise is standard normal and never repeated; return the p-values.

    The noise of different steps and of different clients must be independent.

    noise  `[clients, steps, P]` noise divided by the standard deviation that is claimed for it
    """
    values = noise.reshape(-1).astype(float)
    tests = {"mean": _normal(values), "variance": _spread(values, 0.0, 1.0, len(values))}
    for name, axis in (("steps", 1), ("clients", 0)):
        even, odd = _neighbours(noise, axis)
        products = np.asarray(even * odd, dtype=float).reshape(-1)
        tests[f"repeated between {name}"] = _normal(products)
    return Law("noise", tests)


def _neighbours(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: the elements at positions 0, 2, ... and at 1, 3, ... of this axis."""
    pairs = np.arange(values.shape[axis] // 2)
    return np.take(values, 2 * pairs, axis=axis), np.take(values, 2 * pairs + 1, axis=axis)


def _binomial(total: float, trials: int, chance: float) -> float:
    """Return the two-sided p-value of `total` successes; each trial succeeds with `chance`."""
    below = stats.binom.cdf(total, trials, chance)
    above = stats.binom.sf(total - 1, trials, chance)
    return min(1.0, 2 * float(min(below, above)))


def _normal(values: np.ndarray) -> float:
    """Return the two-sided p-value for the hypothesis of mean 0, given independent values.

    The values have variance 1 under the hypothesis.
    """
    if len(values) == 0:
        return 1.0
    return float(2 * stats.norm.sf(abs(float(values.mean())) * math.sqrt(len(values))))


def _spread(
    values: np.ndarray, mean: float, variance: float, freedom: float, excess: float = 0.0
) -> float:
    """Return the two-sided p-value for the hypothesis that the values have this variance.

    The test statistic is the sum of squared deviations from `mean`, which is known. It is compared
    with a chi-squared distribution, scaled so that its variance fits the kurtosis of the values.

    freedom  degrees of freedom
    excess   excess kurtosis of the values, 0 for normal values
    """
    squares = float(np.square(values - mean).sum())
    if variance <= 0 or freedom < 1:
        return float(squares <= 1e-9)
    scale = 1 + excess / 2
    law = stats.chi2(freedom / scale)
    total = squares / variance / scale
    return min(1.0, 2 * float(min(law.sf(total), law.cdf(total))))


def _excess(trials: int, rate: float) -> float:
    """Return the excess kurtosis of the binomial distribution; 0 for a rate of 0 or 1."""
    spread = rate * (1 - rate)
    return (1 - 6 * spread) / (trials * spread) if spread > 0 else 0.0


def disproofs(reports: Sequence[Report], laws: Sequence[Law]) -> Iterator[str]:
    """Yield one sentence for each audit and each test whose result contradicts the claim."""
    for report in reports:
        if report.disproved:
            yield (
                f"{report.audit} at the {report.seen}: "
                f"epsilon is at least {show_lower_bound(report.lower)} with confidence "
                f"{show_setting(report.confidence)}, but {show_loss(report.claimed)} was claimed"
            )
    for law in laws:
        if law.broken:
            yield (
                f"the {law.what} do not follow the law that was accounted for ({law.verdict}, "
                f"p = {law.p_value:.1g})"
            )

"""The privacy plan of a run: how each client samples records, clips gradients and adds noise.

The plan is fixed before records are read. Its rates, expected batches and noise follow from the
configuration and the declared sizes of the clients, never from records. The oracle, which computes
noised gradients, executes `Plan.mechanism(i)` for client i, and the privacy ledger stores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from dpfed.config import PrivacySection
from dpfed.config.sections import CohortChoice
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma, estimate_sigma
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.accounting.observers import Rounds, View, capped
from dpfed.privacy.clipping import CLIPS, Clipping
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.planning.batch import automatic_batch
from dpfed.privacy.published import show_setting

# Smallest allowed noise multiplier. With less noise, epsilon is so large that it means nothing, and
# its computation is imprecise.
LEAST_NOISE = 0.01
# Clients whose sampling rates differ by at most this relative amount share one noise multiplier.
# The multiplier is calibrated for the highest of these rates.
RATE_STEP = 0.02
NEEDS_TARGET = (
    'privacy.batch = "auto" follows from privacy.target_epsilon: give that, or a number of records'
)


@dataclass(frozen=True)
class Plan:
    """The privacy constants of all clients. Arrays hold one number per client i.

    clip         clip norm C; with quantile clipping, the C of the first round
    sizes        number R_i of protected units (a unit is a record, or all records of a person)
    rates        sampling rate q_i
    expected     expected batch size B_i = q_i R_i, in units
    multipliers  noise multiplier σ_i of one release, as `Mechanism.noise_multiplier`
    batches      new batches in each local step, as declared by the algorithm
    releases     noised gradients released for each batch, as declared by the algorithm
    unit         name of the protected unit, for messages
    clipping     the clipping rule
    """

    sampling: Sampling
    clip: float
    sizes: np.ndarray
    rates: np.ndarray
    expected: np.ndarray
    multipliers: np.ndarray
    batches: int = 1
    releases: int = 1
    unit: str = "record"
    clipping: Clipping = field(default_factory=Clipping)

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"the clip norm must be > 0, not {self.clip}")
        if not math.isfinite(self.clip) and self.multipliers.any():
            raise ValueError(
                "without a finite clip norm there is no noise level that protects anything"
            )
        if not np.allclose(self.expected, self.rates * self.sizes, rtol=1e-9, atol=0):
            raise ValueError("the expected batch of a client is its rate times its size")

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def private(self) -> bool:
        """True if every client adds noise."""
        return bool(self.multipliers.all())

    def mechanism(self, client: int) -> Mechanism:
        return Mechanism(
            sampling=self.sampling,
            rate=float(self.rates[client]),
            noise_multiplier=float(self.multipliers[client]),
            batches=self.batches,
            releases=self.releases,
        )

    def noise_std(self, client: int) -> float:
        """Return the noise's standard deviation on a client's gradient sum; 0 without noise."""
        multiplier = float(self.multipliers[client])
        # Without noise the clip norm may be infinite, and 0 times infinity would be NaN.
        return self.clipping.sum_multiplier(multiplier) * self.clip if multiplier else 0.0

    def count_std(self, client: int) -> float:
        """Return the standard deviation of the noise on a client's count, for quantile clipping."""
        return self.clipping.count_std(float(self.multipliers[client]))

    def at(self, clip: float) -> Plan:
        """Return this plan with another clip norm. The privacy loss does not depend on it."""
        return self if clip == self.clip else replace(self, clip=clip)

    def phi(self, client: int) -> float:
        """Return Φ_i, the public variance of the noise on one coordinate of the mean gradient."""
        return (self.noise_std(client) / float(self.expected[client])) ** 2

    def phis(self, clients: np.ndarray) -> np.ndarray:
        """Return Φ of many clients, as `phi` does for one client: one number per client."""
        multipliers = self.multipliers[clients]
        if not multipliers.any():
            return np.zeros(len(clients))
        std = self.clipping.sum_multiplier(multipliers) * self.clip
        found: np.ndarray = (std / self.expected[clients]) ** 2
        return found

    @property
    def equal_phi(self) -> bool:
        """True if all clients have the same Φ, the noise variance of their mean gradients."""
        levels = self.multipliers / self.expected
        return bool(np.all(levels == levels[0]))

    def kinds(self) -> tuple[list[Mechanism], np.ndarray]:
        """Return the distinct mechanisms, and for each client the index of its mechanism."""
        pairs = np.stack([self.rates, self.multipliers])
        _, first, which = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        return [self.mechanism(int(i)) for i in first], np.asarray(which).reshape(-1)

    def dominating(self) -> Mechanism:
        """Return a mechanism with the highest sampling rate and the least noise of all clients.

        Its privacy loss is at least as large as the loss of each client's mechanism.
        """
        return replace(
            self.mechanism(0),
            rate=float(self.rates.max()),
            noise_multiplier=float(self.multipliers.min()),
        )


@dataclass(frozen=True)
class Schedule:
    """The numbers that decide how often clients take part in a run.

    clients      number of clients N
    cohort       clients that take part in each round, S
    rounds       number of rounds T
    local_steps  local steps K of each client in each round
    choice       how a round's clients are chosen; "balanced": those that were asked least often so
                 far; "uniform": any clients at random
    max_rounds   largest number of rounds of a client; "auto" depends on `choice`
    max_records  largest number of records of all clients of a round in one local step; it limits
                 the batch of privacy.batch = "auto"
    """

    clients: int
    cohort: int
    rounds: int
    local_steps: int
    choice: CohortChoice = "uniform"
    max_rounds: int | str = "auto"
    max_records: float = math.inf

    def __post_init__(self) -> None:
        needed = self.rounds * self.cohort
        if self.cap is not None and self.clients * self.cap < needed:
            raise DpfedError(
                f"run.max_rounds_per_client = {self.cap} is too small: {self.rounds} rounds of "
                f"{self.cohort} clients need {needed} participations, and {self.clients} clients "
                f"have at most {self.clients * self.cap}: use {-(-needed // self.clients)} or more"
            )

    @classmethod
    def of(cls, clients: int, rounds: int, local_steps: int, participation: float) -> Schedule:
        return cls(clients, max(1, round(participation * clients)), rounds, local_steps)

    @property
    def participation(self) -> float:
        """Fraction of the clients that take part in each round, `cohort` / `clients`.

        It can differ from the configured fraction, because `cohort` is a whole number.
        """
        return self.cohort / self.clients

    @property
    def cap(self) -> int | None:
        """Largest number of rounds of a client; None if a client may take part in every round.

        If all clients take part in each round, "auto" sets no cap: there is nothing to choose.
        """
        if isinstance(self.max_rounds, int):
            return min(self.max_rounds, self.rounds)
        if self.choice == "balanced" and self.cohort < self.clients:
            return -(-self.rounds * self.cohort // self.clients)
        return None

    @property
    def most_rounds(self) -> int:
        """Largest number of rounds of a client: the cap, or all rounds without a cap."""
        return self.rounds if self.cap is None else self.cap

    def rounds_for(self, step: Mechanism, view: View) -> Rounds:
        """Return the rounds of one client from which `view_epsilon` computes an observer's epsilon.

        step  mechanism of one local step
        view  the observer
        """
        rounds = Rounds(step, self.local_steps, self.rounds, self.participation)
        return capped(view, rounds, self.cap)


def make_plan(
    privacy: PrivacySection,
    sizes: np.ndarray,
    schedule: Schedule,
    batches: int,
    releases: int,
    unit: str | None = None,
) -> Plan:
    """Return the privacy plan for this configuration, without reading any record.

    sizes     declared number of protected units of each client
    batches   new batches in each local step
    releases  noised gradients released for each batch
    unit      name of the protected unit; None means "record"
    """
    _check_numbers(privacy)
    if privacy.batch == "auto":
        step = Mechanism(privacy.sampling, 1.0, 1.0, batches, releases)
        batch = _automatic_batch(privacy, sizes, schedule, step)
        privacy = replace(privacy, batch=float(batch))
    rates, expected = _batches_for(privacy, sizes)
    plan = Plan(
        sampling=privacy.sampling,
        clip=privacy.clip if privacy.enabled else math.inf,
        sizes=sizes,
        rates=rates,
        expected=expected,
        multipliers=np.zeros(len(sizes)),
        batches=batches,
        releases=releases,
        unit=unit or "record",
        clipping=_clipping_of(privacy) if privacy.enabled else Clipping(),
    )
    if not privacy.enabled or privacy.sigma == 0:
        return plan
    return replace(plan, multipliers=_multipliers(privacy, plan, schedule))


def _multipliers(privacy: PrivacySection, plan: Plan, schedule: Schedule) -> np.ndarray:
    """Return the noise multiplier of each client.

    If the configuration gives `privacy.sigma`, every client has this multiplier. Otherwise it is
    the smallest multiplier that keeps epsilon within `privacy.target_epsilon`.
    """
    if privacy.sigma is None and privacy.sigma_per_client:
        return _sigma_per_client(privacy, plan, schedule)
    if privacy.sigma is None:
        multiplier = _calibrated(privacy, plan.dominating(), schedule)
    elif privacy.sigma < LEAST_NOISE:
        raise DpfedError(
            f"the noise multiplier {show_setting(privacy.sigma)} protects nothing: "
            f"use at least {show_setting(LEAST_NOISE)}, or privacy.sigma = 0 "
            "or privacy.enabled = false to go without"
        )
    else:
        multiplier = privacy.sigma
    return np.full(plan.clients, multiplier)


def _clipping_of(privacy: PrivacySection) -> Clipping:
    given = {
        "stability": privacy.clip_stability,
        "quantile": privacy.quantile,
        "rate": privacy.quantile_lr,
        "count_noise": privacy.quantile_noise,
    }
    constants = {key: value for key, value in given.items() if value is not None}
    return Clipping(privacy.clip_mode, **constants)


def _sigma_per_client(privacy: PrivacySection, plan: Plan, schedule: Schedule) -> np.ndarray:
    """Return for each client the smallest noise multiplier that stays within the target epsilon.

    Clients with nearly equal rates form a group and share one multiplier, which saves time.
    """
    groups = np.ceil(np.log(plan.rates) / RATE_STEP)
    multipliers = np.zeros(plan.clients)
    for group in np.unique(groups):
        members = groups == group
        worst = replace(plan.mechanism(0), rate=float(plan.rates[members].max()))
        multipliers[members] = _calibrated(privacy, worst, schedule)
    return multipliers


def _calibrated(privacy: PrivacySection, worst: Mechanism, schedule: Schedule) -> float:
    """Return the smallest noise multiplier that stays within the target epsilon.

    worst  mechanism with the largest privacy loss of all clients that share this multiplier
    """
    if privacy.target_epsilon is None:
        raise ValueError("calibration needs a target")
    rounds = schedule.rounds_for(worst, privacy.view)
    return calibrate_sigma(rounds, privacy.target_epsilon, privacy.delta, privacy.view)


def _automatic_batch(
    privacy: PrivacySection, sizes: np.ndarray, schedule: Schedule, step: Mechanism
) -> int:
    """Return the batch size for privacy.batch = "auto", from public numbers only."""
    target = privacy.target_epsilon
    if target is None:
        raise DpfedError(NEEDS_TARGET)
    records = float(sizes.min() if privacy.batch_per_client else sizes.mean())

    def noise(batch: float) -> float:
        rounds = schedule.rounds_for(replace(step, rate=batch / records), privacy.view)
        return estimate_sigma(rounds, target, privacy.delta, privacy.view) / batch

    return automatic_batch(noise, records, schedule.max_records / schedule.cohort)


def _check_numbers(privacy: PrivacySection) -> None:
    """Raise DpfedError if a privacy setting is out of range, or if batch settings contradict."""
    check_delta(privacy.delta)
    if privacy.batch_per_client and privacy.batch is None:
        raise DpfedError(
            "privacy.batch_per_client gives every client the same batch: "
            "give privacy.batch, not privacy.rate"
        )
    if privacy.enabled and not (CLIPS[0] <= privacy.clip <= CLIPS[1] or math.isinf(privacy.clip)):
        raise DpfedError(
            f"privacy.clip = {privacy.clip:g} is not allowed: "
            f"it must be from {CLIPS[0]:g} to {CLIPS[1]:g}"
        )
    if privacy.sigma is not None and not math.isfinite(privacy.sigma):
        raise DpfedError(
            f"privacy.sigma = {privacy.sigma} is not allowed: it must be a finite number"
        )


def _batches_for(privacy: PrivacySection, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampling rate and the expected batch size of every client.

    By default, clients of different sizes have the same rate. With the same batch size instead, the
    smallest client would have the largest rate and therefore the largest privacy loss.
    """
    equal_batches = privacy.batch_per_client or not np.ptp(sizes)
    if privacy.batch is None:
        rates = np.full(len(sizes), privacy.rate)
        expected = rates * sizes
    elif equal_batches:
        expected = np.full(len(sizes), float(privacy.batch))
        rates = expected / sizes
    else:
        rates = np.full(len(sizes), float(privacy.batch) / float(sizes.mean()))
        expected = rates * sizes
    if rates.max() > 1:
        smallest = int(np.argmin(sizes))
        holder = f"the mean client, {sizes.mean():g}"
        if np.ptp(expected) == 0:
            holder = f"client {smallest}, which has {sizes[smallest]}"
        raise DpfedError(
            f"privacy.batch = {privacy.batch:g} is larger than {holder}: "
            "use a smaller batch or fewer clients"
        )
    if privacy.sampling == "fixed_wor":
        expected = np.maximum(1.0, np.round(expected))
        rates = expected / sizes
    return rates, expected

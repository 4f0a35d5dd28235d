"""The privacy plan: every constant of the mechanism, fixed before any private record is read.

Rates, expected batches and noise follow from the configuration and the declared sizes of the
clients, never from data. Client i's oracle executes `Plan.mechanism(i)`, and its ledger stores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from dpfed.config import PrivacySection
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.accounting.observers import Rounds
from dpfed.privacy.clipping import CLIPS, Clipping
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.published import show_setting

# Below this noise multiplier epsilon has no meaning, and accountants have no precision.
LEAST_NOISE = 0.01
# Largest relative difference of rates that share one calibration, made for the highest.
RATE_STEP = 0.02


@dataclass(frozen=True)
class Plan:
    """The constants of all clients; arrays hold one number per client.

    clip         the clip norm C; with quantile clipping, that of the first round
    sizes        protected units R_i
    rates        sampling rates q_i
    expected     expected batches B_i = q_i R_i
    multipliers  noise multipliers σ_i of one release, the count included
    batches      fresh batches of one local step, as declared by the algorithm
    releases     releases of each batch, as declared by the algorithm
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
        """Return the standard deviation on one client's clipped sum; 0 without noise."""
        multiplier = float(self.multipliers[client])
        # Without noise C may be infinite, and 0 times infinity is NaN.
        return self.clipping.sum_multiplier(multiplier) * self.clip if multiplier else 0.0

    def count_std(self, client: int) -> float:
        """Return the standard deviation on one client's count (quantile clipping)."""
        return self.clipping.count_std(float(self.multipliers[client]))

    def at(self, clip: float) -> Plan:
        """Return the plan of a round with this clip norm; no charge depends on it."""
        return self if clip == self.clip else replace(self, clip=clip)

    def phi(self, client: int) -> float:
        """Return Φ_i, the public variance of one coordinate of the noised mean gradient."""
        return (self.noise_std(client) / float(self.expected[client])) ** 2

    def phis(self, clients: np.ndarray) -> np.ndarray:
        """Return `phi` of many clients."""
        multipliers = self.multipliers[clients]
        if not multipliers.any():
            return np.zeros(len(clients))
        std = self.clipping.sum_multiplier(multipliers) * self.clip
        found: np.ndarray = (std / self.expected[clients]) ** 2
        return found

    @property
    def equal_phi(self) -> bool:
        """True if all clients have the same Φ."""
        levels = self.multipliers / self.expected
        return bool(np.all(levels == levels[0]))

    def kinds(self) -> tuple[list[Mechanism], np.ndarray]:
        """Return the distinct mechanisms, and for each client the index of its own."""
        pairs = np.stack([self.rates, self.multipliers])
        _, first, which = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        return [self.mechanism(int(i)) for i in first], np.asarray(which).reshape(-1)

    def dominating(self) -> Mechanism:
        """Return a mechanism that costs at least as much as that of any client."""
        return replace(
            self.mechanism(0),
            rate=float(self.rates.max()),
            noise_multiplier=float(self.multipliers.min()),
        )


@dataclass(frozen=True)
class Schedule:
    """Participation: S of N clients in each of T rounds, with K local steps each."""

    clients: int
    cohort: int
    rounds: int
    local_steps: int

    @classmethod
    def of(cls, clients: int, rounds: int, local_steps: int, participation: float) -> Schedule:
        return cls(clients, max(1, round(participation * clients)), rounds, local_steps)

    @property
    def participation(self) -> float:
        """The realised S/N."""
        return self.cohort / self.clients


def make_plan(
    privacy: PrivacySection,
    sizes: np.ndarray,
    schedule: Schedule,
    batches: int,
    releases: int,
    unit: str | None = None,
) -> Plan:
    """Return the plan that follows from declared sizes and the configuration alone."""
    _check_numbers(privacy)
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
    """Return the noise multiplier of each client, as given or calibrated to the target."""
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
    """Return the noise with which each client reaches the target, calibrated per group of rates."""
    groups = np.ceil(np.log(plan.rates) / RATE_STEP)
    multipliers = np.zeros(plan.clients)
    for group in np.unique(groups):
        members = groups == group
        worst = replace(plan.mechanism(0), rate=float(plan.rates[members].max()))
        multipliers[members] = _calibrated(privacy, worst, schedule)
    return multipliers


def _calibrated(privacy: PrivacySection, worst: Mechanism, schedule: Schedule) -> float:
    """Return the smallest noise multiplier with which this mechanism stays within the target."""
    if privacy.target_epsilon is None:
        raise ValueError("calibration needs a target")
    rounds = Rounds(worst, schedule.local_steps, schedule.rounds, schedule.participation)
    return calibrate_sigma(rounds, privacy.target_epsilon, privacy.delta, privacy.view)


def _check_numbers(privacy: PrivacySection) -> None:
    """Refuse numbers with which the plan protects nothing, or that float32 cannot hold."""
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
    """Return the rate and the expected batch of every client.

    Unequal clients share one rate by default. With equal batches the smallest client would have
    the largest rate, and so the largest privacy loss.
    """
    equal_batches = privacy.batch_per_client or not np.ptp(sizes)
    if privacy.batch is None:
        rates = np.full(len(sizes), privacy.rate)
        expected = rates * sizes
    elif equal_batches:
        expected = np.full(len(sizes), float(privacy.batch))
        rates = expected / sizes
    else:
        rates = np.full(len(sizes), privacy.batch / float(sizes.mean()))
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

"""The privacy plan: every constant of the mechanism, fixed before any private record is read.

Rates, expected batch sizes and noise levels follow from the *declared* sizes of the clients and the configuration; they
are never recomputed from data. `Plan.mechanism(i)` is what client i's oracle runs and what its ledger rows say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from dpfed.config import PrivacySection
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma
from dpfed.privacy.accounting.pld import check_delta
from dpfed.privacy.clipping import CLIPS, Clipping
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.published import show_setting

LEAST_NOISE = 0.01  # below it epsilon has no meaning, and accountants no precision
RATE_STEP = 0.02  # with a sigma for each client: rates within 2 % share one calibration, that of the highest


@dataclass(frozen=True)
class Plan:
    """Constants per client: sizes R_i (in protected units), rates q_i, expected batches B_i = q_i R_i, noise multipliers.

    multipliers  noise of one release against its sensitivity: of the clipped sum, with the count where one is released
    clip, clipping  the clip norm C (of the first round, where it moves) and the rule it is used by
    batches, releases  what one local step takes from the oracle, as the algorithm declares it
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
        """Standard deviation of the noise on client i's clipped sum; exactly 0 without noise, also for C = inf."""
        multiplier = float(self.multipliers[client])
        return self.clipping.sum_multiplier(multiplier) * self.clip if multiplier else 0.0

    def count_std(self, client: int) -> float:
        """Standard deviation of the noise on client i's count of units at or below C (quantile clipping)."""
        return self.clipping.count_std(float(self.multipliers[client]))

    def at(self, clip: float) -> Plan:
        """The plan of a round with this clip norm; nothing that is charged depends on it."""
        return self if clip == self.clip else replace(self, clip=clip)

    def phi(self, client: int) -> float:
        """Φ_i: variance of one coordinate of the noised mean gradient, known to everybody."""
        return (self.noise_std(client) / float(self.expected[client])) ** 2

    def phis(self, clients: np.ndarray) -> np.ndarray:
        """Φ_i of many clients at once, the same numbers as `phi` gives one by one."""
        multipliers = self.multipliers[clients]
        if not multipliers.any():
            return np.zeros(len(clients))
        std = self.clipping.sum_multiplier(multipliers) * self.clip
        found: np.ndarray = (std / self.expected[clients]) ** 2
        return found

    @property
    def equal_phi(self) -> bool:
        levels = self.multipliers / self.expected
        return bool(np.all(levels == levels[0]))

    def kinds(self) -> tuple[list[Mechanism], np.ndarray]:
        """The different mechanisms there are, and which of them each client runs."""
        _, first, which = np.unique(
            np.stack([self.rates, self.multipliers]), axis=1, return_index=True, return_inverse=True
        )
        return [self.mechanism(int(i)) for i in first], np.asarray(which).reshape(-1)

    def dominating(self) -> Mechanism:
        """The highest rate with the least noise: at least as costly as any client's mechanism."""
        return replace(
            self.mechanism(0),
            rate=float(self.rates.max()),
            noise_multiplier=float(self.multipliers.min()),
        )


@dataclass(frozen=True)
class Schedule:
    """Who takes part how often: N clients, S of them in each of T rounds, K local steps each."""

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
    """Rates, batch sizes and noise of every client, from declared sizes and the configuration alone."""
    _check_numbers(privacy)
    rates, expected = batches_for(privacy, sizes)
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
        clipping=clipping_of(privacy) if privacy.enabled else Clipping(),
    )
    if not privacy.enabled or privacy.sigma == 0:
        return plan
    if privacy.sigma is not None:
        multiplier = privacy.sigma
        if multiplier < LEAST_NOISE:
            raise DpfedError(
                f"the noise multiplier {show_setting(multiplier)} protects nothing: "
                f"use at least {show_setting(LEAST_NOISE)}, or privacy.sigma = 0 "
                "or privacy.enabled = false to go without"
            )
    elif privacy.sigma_per_client:
        return replace(plan, multipliers=sigma_per_client(privacy, plan, schedule))
    else:
        multiplier = calibrated(privacy, plan.dominating(), schedule)
    return replace(plan, multipliers=np.full(len(sizes), multiplier))


def clipping_of(privacy: PrivacySection) -> Clipping:
    """The clipping rule with its constants; those not given have the rule's defaults."""
    given = {
        "stability": privacy.clip_stability,
        "quantile": privacy.quantile,
        "rate": privacy.quantile_lr,
        "count_noise": privacy.quantile_noise,
    }
    return Clipping(
        privacy.clip_mode, **{key: value for key, value in given.items() if value is not None}
    )


def sigma_per_client(privacy: PrivacySection, plan: Plan, schedule: Schedule) -> np.ndarray:
    """A noise level for each client that reaches the same target; similar rates share the level of the highest."""
    level = np.ceil(np.log(plan.rates) / RATE_STEP)
    found = {}
    for value in np.unique(level):
        rate = float(plan.rates[level == value].max())
        found[value] = calibrated(privacy, replace(plan.mechanism(0), rate=rate), schedule)
    return np.array([found[value] for value in level])


def calibrated(privacy: PrivacySection, worst: Mechanism, schedule: Schedule) -> float:
    """The smallest noise multiplier with which this mechanism stays within the target."""
    if privacy.target_epsilon is None:
        raise ValueError("calibration needs a target")
    return calibrate_sigma(
        rate=worst.rate,
        local_steps=schedule.local_steps,
        rounds=schedule.rounds,
        target_epsilon=privacy.target_epsilon,
        delta=privacy.delta,
        participation=schedule.participation,
        view=privacy.view,
        sampling=worst.sampling,
        batches=worst.batches,
        releases=worst.releases,
    )


def _check_numbers(privacy: PrivacySection) -> None:
    """Norms and noise are computed in single precision, where squares of far smaller or larger numbers are lost."""
    check_delta(privacy.delta)
    if privacy.batch_per_client and privacy.batch is None:
        raise DpfedError(
            "privacy.batch_per_client gives every client the same batch: give privacy.batch, not privacy.rate"
        )
    if privacy.enabled and not (CLIPS[0] <= privacy.clip <= CLIPS[1] or math.isinf(privacy.clip)):
        raise DpfedError(
            f"privacy.clip = {privacy.clip:g} is not allowed: it must be from {CLIPS[0]:g} to {CLIPS[1]:g}"
        )
    if privacy.sigma is not None and not math.isfinite(privacy.sigma):
        raise DpfedError(
            f"privacy.sigma = {privacy.sigma} is not allowed: it must be a finite number"
        )


def batches_for(privacy: PrivacySection, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rate and expected batch of every client.

    Unequal clients share one rate unless told otherwise: with equal batches the smallest would pay most (SPEC 6.3).
    """
    if privacy.batch is None or (not privacy.batch_per_client and bool(np.any(sizes != sizes[0]))):
        rate = privacy.rate if privacy.batch is None else privacy.batch / float(sizes.mean())
        rates = np.full(len(sizes), rate)
        expected = rates * sizes
    else:
        expected = np.full(len(sizes), float(privacy.batch))
        rates = expected / sizes
    if rates.max() > 1:
        small = int(
            np.argmin(sizes)
        )  # clients that share a rate are told by their mean, which is what was passed
        told = (
            f"client {small}, which has {sizes[small]}"
            if np.ptp(expected) == 0
            else f"the mean client, {sizes.mean():g}"
        )
        raise DpfedError(
            f"privacy.batch = {privacy.batch:g} is larger than {told}: use a smaller batch or fewer clients"
        )
    if privacy.sampling == "fixed_wor":
        expected = np.maximum(1.0, np.round(expected))
        rates = expected / sizes
    return rates, expected

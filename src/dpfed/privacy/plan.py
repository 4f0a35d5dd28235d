"""The privacy plan: every constant of the mechanism, fixed before any private record is read.

Rates, expected batch sizes and noise levels follow from the *declared* sizes of the clients and the configuration; they
are never recomputed from data. `Plan.mechanism(i)` is what client i's oracle runs and what its ledger rows say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dpfed.config import PrivacySection
from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism, Sampling


@dataclass(frozen=True)
class Plan:
    """Constants per client: sizes R_i (in protected units), expected batches B_i, noise multipliers.

    multipliers  standard deviation of the noise on a clipped sum, divided by the clip norm C
    batches, releases  what one local step takes from the oracle, as the algorithm declares it
    """

    sampling: Sampling
    clip: float
    sizes: np.ndarray
    expected: np.ndarray
    multipliers: np.ndarray
    batches: int = 1
    releases: int = 1
    unit: str = "record"

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"the clip norm must be > 0, not {self.clip}")
        if not math.isfinite(self.clip) and self.multipliers.any():
            raise ValueError("without a finite clip norm there is no noise level that protects anything")
        if bool((self.expected > self.sizes).any()):
            raise ValueError("an expected batch is larger than its client")

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def private(self) -> bool:
        return bool(self.multipliers.all())

    @property
    def rates(self) -> np.ndarray:
        return self.expected / self.sizes

    def mechanism(self, client: int) -> Mechanism:
        return Mechanism(
            sampling=self.sampling,
            rate=float(self.expected[client] / self.sizes[client]),
            noise_multiplier=float(self.multipliers[client]),
            batches=self.batches,
            releases=self.releases,
        )

    def noise_std(self, client: int) -> float:
        """Standard deviation of the noise on client i's clipped sum; exactly 0 without noise, also for C = inf."""
        multiplier = self.mechanism(client).noise_multiplier
        return multiplier * self.clip if multiplier else 0.0

    def phi(self, client: int) -> float:
        """Φ_i: variance of one coordinate of the noised mean gradient, known to everybody."""
        return (self.noise_std(client) / float(self.expected[client])) ** 2

    @property
    def equal_phi(self) -> bool:
        levels = self.multipliers / self.expected
        return bool(np.all(levels == levels[0]))

    def equal(self) -> bool:
        """Whether all clients run the same mechanism, so that one epsilon speaks for all."""
        return bool(np.all(self.rates == self.rates[0]) and np.all(self.multipliers == self.multipliers[0]))


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
    expected = expected_batches(privacy, sizes)
    plan = Plan(
        sampling=privacy.sampling,
        clip=privacy.clip if privacy.enabled else math.inf,
        sizes=sizes,
        expected=expected,
        multipliers=np.zeros(len(sizes)),
        batches=batches,
        releases=releases,
        unit=unit or "record",
    )
    if not privacy.enabled or privacy.sigma == 0:
        return plan
    if privacy.sigma is not None:
        # The printed noise of the paper has one factor C too many: its real multiplier is σ·C (SPEC 4).
        multiplier = privacy.sigma * (privacy.clip if privacy.noise_scale == "literal_c2" else 1.0)
    else:
        worst = replace(plan.mechanism(int(np.argmax(plan.rates))), noise_multiplier=1.0)
        multiplier = calibrated(privacy, worst, schedule)
    return replace(plan, multipliers=np.full(len(sizes), multiplier))


def calibrated(privacy: PrivacySection, worst: Mechanism, schedule: Schedule) -> float:
    from dpfed.privacy.calibrate import calibrate_sigma

    if privacy.target_epsilon is None:
        raise ValueError("calibration needs a target")
    return calibrate_sigma(
        worst,
        schedule.local_steps,
        schedule.rounds,
        schedule.participation,
        privacy.target_epsilon,
        privacy.delta,
        privacy.view,
    )


def expected_batches(privacy: PrivacySection, sizes: np.ndarray) -> np.ndarray:
    """B_i for every client. Unequal clients share one rate unless told otherwise: the smallest would pay most (SPEC 6.3)."""
    if privacy.rate is not None:
        expected = privacy.rate * sizes
    elif privacy.batch_per_client or bool(np.all(sizes == sizes[0])):
        expected = np.full(len(sizes), float(privacy.batch or 0))
    else:
        expected = float(privacy.batch or 0) / sizes.mean() * sizes
    small = int(np.argmin(sizes - expected))
    if expected[small] > sizes[small]:
        raise DpfedError(
            f"privacy.batch = {privacy.batch:g} is larger than client {small}, which has {sizes[small]}: "
            "use a smaller batch or fewer clients"
        )
    if privacy.sampling == "fixed_wor":
        expected = np.maximum(1.0, np.round(expected))
    return np.asarray(expected, dtype=np.float64)

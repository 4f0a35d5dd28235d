"""Setting and size of an audit: its clients, steps, canaries and training runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.auditing.guesses import Least, accounted
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Streams
from dpfed.privacy.plan import Plan
from dpfed.training.job.job import Job

# Largest number of local steps of all clients and runs together. The digits example computes 5,400
# in 49 s on one CPU core.
MAX_CLIENT_STEPS = 10_000


@dataclass(frozen=True)
class AuditSetting:
    """The clients and steps of an audit.

    plan         mechanism of each audited client; arrays have one entry per audited client
    delta        delta at which epsilons are compared
    rounds       rounds of each training run; every audited client takes part in all of them
    local_steps  steps of a client in each round
    streams      random streams of the audit
    """

    plan: Plan
    delta: float
    rounds: int
    local_steps: int
    streams: Streams

    @property
    def steps(self) -> int:
        return self.rounds * self.local_steps

    @property
    def sum_multipliers(self) -> np.ndarray:
        """The noise multiplier of each client's gradient sum, if a batch's releases are averaged.

        With quantile clipping, each release has a sum and a count. The multiplier in the plan
        covers both, so the multiplier of the sum alone is larger.
        """
        alone = self.plan.clipping.sum_multiplier(self.plan.multipliers)
        return np.asarray(alone / np.sqrt(self.plan.releases))

    def epsilons(self) -> np.ndarray:
        """Return the epsilon claimed for each client after the audited steps, `[clients]`."""
        kinds, which = self.plan.kinds()
        each = np.array([epsilon([(kind, self.steps)], self.delta) for kind in kinds])
        return np.asarray(each[which])

    def epsilon_at(self, ratio: float) -> float:
        """Return the largest epsilon of all clients with noise that is `ratio` times smaller."""
        return max(epsilon(h, self.delta) for h in self._histories(ratio))

    def curve_at(self, ratio: float) -> Least:
        """Return the clients' common trade-off curve with noise that is `ratio` times smaller."""
        return accounted(self._histories(ratio))

    def _histories(self, ratio: float) -> list[tuple[tuple[Mechanism, int], ...]]:
        kinds, _ = self.plan.kinds()
        scaled = [replace(kind, noise_multiplier=kind.noise_multiplier / ratio) for kind in kinds]
        return [((kind, self.steps),) for kind in scaled]

    def only(self, clients: np.ndarray) -> AuditSetting:
        """Return this setting with only these clients; one listed twice counts as two clients."""
        plan = replace(
            self.plan,
            sizes=self.plan.sizes[clients],
            rates=self.plan.rates[clients],
            expected=self.plan.expected[clients],
            multipliers=self.plan.multipliers[clients],
        )
        return replace(self, plan=plan)


@dataclass(frozen=True)
class AuditSize:
    """The size of an audit.

    canaries  number of canaries of each client in each training run
    runs      number of training runs
    """

    canaries: int
    runs: int


def setting_of(job: Job) -> AuditSetting:
    """Return the setting of an audit of all clients of this job.

    The audit has random streams of its own, so it repeats no random number of the job. Each client
    takes part in as many rounds as the job allows one client, and the claimed epsilon covers these.
    """
    streams = Streams(job.streams.number("check", 1), secret=job.streams.secret)
    return AuditSetting(
        job.plan,
        job.config.privacy.delta,
        job.schedule.most_rounds,
        job.config.run.local_steps,
        streams,
    )


def chosen_clients(epsilons: np.ndarray, most: int) -> np.ndarray:
    """Choose at most `most` clients for an audit: evenly spaced in a list sorted by epsilon.

    The client with the largest epsilon is always chosen.
    """
    order = np.argsort(-epsilons, kind="stable")
    chosen = np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)
    return np.sort(order[np.unique(chosen)])


def fair_coins(setting: AuditSetting, per_client: int, stream: int) -> np.ndarray:
    """Draw fair coins that decide which canaries are in the data, `[clients, per_client]`.

    stream  number of the random stream; coins of different streams are independent
    """
    rng = setting.streams.generator("check", stream)
    return rng.random((setting.plan.clients, per_client)) < 0.5


def size_for(setting: AuditSetting, canaries: int, most: int) -> AuditSize:
    """Return the size of an audit with about this many canaries in all.

    In one training run, at most half of a client's units are canaries, and at most `most`. If these
    are too few, the job is trained several times, with new canaries each time.
    """
    plan = setting.plan
    room = max(1, min(int(plan.sizes.min()) // 2, most))
    runs = -(-canaries // (plan.clients * room))
    runs = max(1, min(runs, MAX_CLIENT_STEPS // (plan.clients * setting.steps)))
    return AuditSize(max(1, min(room, round(canaries / (plan.clients * runs)))), runs)

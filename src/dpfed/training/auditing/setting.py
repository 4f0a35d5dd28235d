"""Setting of an audit: the clients, the steps and the number of canaries."""

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
    """The clients and steps that an audit runs."""

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
        """The noise multiplier of each client's sum, averaged over the releases of a batch.

        With quantile clipping the oracle also releases a count. The charged multiplier covers sum
        and count, so the multiplier of the sum alone is larger.
        """
        alone = self.plan.clipping.sum_multiplier(self.plan.multipliers)
        return np.asarray(alone / np.sqrt(self.plan.releases))

    def epsilons(self) -> np.ndarray:
        """Return the epsilon claimed for each client after the audited steps, `[clients]`."""
        kinds, which = self.plan.kinds()
        each = np.array([epsilon([(kind, self.steps)], self.delta) for kind in kinds])
        return np.asarray(each[which])

    def epsilon_at(self, ratio: float) -> float:
        """Return the largest epsilon of a client if noise were `ratio` times smaller."""
        return max(epsilon(h, self.delta) for h in self._histories(ratio))

    def curve_at(self, ratio: float) -> Least:
        """Return the trade-off curve of the worst client if noise were `ratio` times smaller."""
        return accounted(self._histories(ratio))

    def _histories(self, ratio: float) -> list[tuple[tuple[Mechanism, int], ...]]:
        kinds, _ = self.plan.kinds()
        scaled = [replace(kind, noise_multiplier=kind.noise_multiplier / ratio) for kind in kinds]
        return [((kind, self.steps),) for kind in scaled]

    def only(self, clients: np.ndarray) -> AuditSetting:
        """Return this setting for these clients; a client listed twice gives independent copies."""
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
    """How many canaries an audit has.

    canaries  canaries of each client in each run
    runs      how often the job is trained
    """

    canaries: int
    runs: int


def setting_of(job: Job) -> AuditSetting:
    """Return the setting that audits a job. Its random streams repeat none of the run.

    With a cap on rounds, no client takes part in more rounds, and the claim counts no more.
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
    """Return at most `most` clients, evenly spaced by rank of epsilon, from the largest epsilon."""
    order = np.argsort(-epsilons, kind="stable")
    chosen = np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)
    return np.sort(order[np.unique(chosen)])


def fair_coins(setting: AuditSetting, per_client: int, stream: int) -> np.ndarray:
    """Draw fair coins `[clients, per_client]`, independent for different `stream` numbers."""
    rng = setting.streams.generator("check", stream)
    return rng.random((setting.plan.clients, per_client)) < 0.5


def size_for(setting: AuditSetting, canaries: int, most: int) -> AuditSize:
    """Return the size of an audit with about this many canaries.

    At most half of a client's units are canaries, and at most `most`. If that is too few, the job
    is trained several times, with fresh canaries each time.
    """
    plan = setting.plan
    room = max(1, min(int(plan.sizes.min()) // 2, most))
    runs = -(-canaries // (plan.clients * room))
    runs = max(1, min(runs, MAX_CLIENT_STEPS // (plan.clients * setting.steps)))
    return AuditSize(max(1, min(room, round(canaries / (plan.clients * runs)))), runs)

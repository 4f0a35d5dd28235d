"""What the clients have spent: charges go to the ledger before each round, budgets decide who may still take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpfed.engine.setup import Job
from dpfed.errors import DpfedError, StoppedError
from dpfed.privacy.ledger import Charge, Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.population import largest_epsilon
from dpfed.privacy.views import Rounds, server_epsilon, third_party_rounds_epsilon

FEW = 8  # so many different mechanisms are accounted for one by one; for more, a mechanism that costs at least as much


@dataclass(frozen=True)
class Figures:
    """Epsilon of the whole plan (n = T) and of what was really spent."""

    server_worst: float
    server_max: float
    third_party: float


class Spending:
    """The run's accounts. Without privacy nothing is charged and there are no figures."""

    def __init__(self, job: Job, ledger: Ledger | None) -> None:
        if (job.config.run.min_clients or 0) > job.plan.clients:
            raise DpfedError(
                f"run.min_clients = {job.config.run.min_clients} is more than the {job.plan.clients} clients there are"
            )
        self._job, self._ledger = job, ledger
        self.taken = np.zeros(job.plan.clients, dtype=np.int64)
        self._drawn_from: list[tuple[int, int]] = []  # (cohort, eligible) of each round
        self._limit = self._limits()

    @property
    def active(self) -> bool:
        return self._job.plan.private

    def eligible(self) -> np.ndarray:
        """Clients whose next round stays within their budget."""
        clients = np.arange(self._job.plan.clients)
        return clients if self._limit is None else clients[self.taken < self._limit]

    def enough(self, t: int) -> np.ndarray:
        """The eligible clients, or the end of the run."""
        able = self.eligible()
        needed = self._job.config.run.min_clients or self._job.schedule.cohort
        if len(able) < needed:
            raise StoppedError(
                f"before round {t} only {len(able)} clients are within privacy.budget = "
                f"{self._job.config.privacy.budget:g} and {needed} are needed: the run ends with what it has"
            )
        return able

    def charge(self, t: int, cohort: Sequence[int], eligible: int) -> None:
        """Durable when it returns; only then may the round's noised values leave the oracle's caller."""
        job = self._job
        if self._ledger is not None:
            steps, noise = job.schedule.local_steps, job.config.run.noise
            self._ledger.charge([Charge(i, t, steps, job.plan.mechanism(i), noise) for i in cohort])
        self.taken[list(cohort)] += 1
        self._drawn_from.append((len(cohort), eligible))

    def server_max(self) -> float | None:
        """The largest epsilon of any client, for the rounds it really took part in."""
        return self._largest(self.taken) if self.active else None

    def figures(self) -> Figures | None:
        if not self.active:
            return None
        worst = self._largest(np.full(self._job.plan.clients, self._job.schedule.rounds))
        spent = self._largest(self.taken)
        return Figures(worst, spent, min(worst, self._third_party()))

    def _largest(self, rounds: np.ndarray) -> float:
        """The server's figure for the client that lost most, if client i took part in `rounds[i]` rounds."""
        plan, steps, delta = self._job.plan, self._job.schedule.local_steps, self._job.config.privacy.delta
        if plan.sampling == "poisson":
            releases = {"batches": plan.batches, "releases": plan.releases}
            return largest_epsilon(plan.rates, rounds, steps, plan.multipliers, delta, **releases)
        kinds, which = plan.kinds()
        return max(server_epsilon(kind, steps, int(rounds[which == k].max()), delta) for k, kind in enumerate(kinds))

    def _third_party(self) -> float:
        """SPEC 6.2(b) for the planned rounds; rounds already run count with the clients they were drawn from."""
        job, schedule = self._job, self._job.schedule
        kinds, _ = job.plan.kinds()
        ahead = schedule.rounds - len(self._drawn_from)
        drawn = [*self._drawn_from, *[(schedule.cohort, schedule.clients)] * ahead]
        chances = sorted({(s, n): drawn.count((s, n)) for s, n in drawn}.items())

        def epsilon(kind: Mechanism) -> float:
            history = [Rounds(kind, schedule.local_steps, count, s / n) for (s, n), count in chances]
            return third_party_rounds_epsilon(history, job.config.privacy.delta)

        return max(epsilon(kind) for kind in (kinds if len(kinds) <= FEW else [job.plan.dominating()]))

    def _limits(self) -> np.ndarray | None:
        """How many rounds each client may take part in."""
        job, budget = self._job, self._job.config.privacy.budget
        if budget is None or not self.active:
            return None
        kinds, which = job.plan.kinds()
        if len(kinds) > FEW:  # rounded up to the next higher rate and lower noise on a grid: never too many rounds
            kinds, which = _coarser(job.plan.rates, job.plan.multipliers, kinds[0])
        allowed = [self._rounds_within(kind, budget) for kind in kinds]
        limits: np.ndarray = np.array(allowed)[which]
        return limits

    def _rounds_within(self, kind: Mechanism, budget: float) -> int:
        job = self._job
        low, high = 0, job.schedule.rounds + 1
        while high - low > 1:
            middle = (low + high) // 2
            within = server_epsilon(kind, job.schedule.local_steps, middle, job.config.privacy.delta) <= budget
            low, high = (middle, high) if within else (low, middle)
        return low


def _coarser(rates: np.ndarray, multipliers: np.ndarray, like: Mechanism) -> tuple[list[Mechanism], np.ndarray]:
    step = 0.05
    rate = np.minimum(1.0, np.exp(np.ceil(np.log(rates) / step) * step))
    noise = np.exp(np.floor(np.log(multipliers) / step) * step)
    pairs, which = np.unique(np.stack([rate, noise]), axis=1, return_inverse=True)
    made = [Mechanism(like.sampling, float(q), float(s), like.batches, like.releases) for q, s in pairs.T]
    return made, np.asarray(which).reshape(-1)

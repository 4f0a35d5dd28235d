"""What the clients have spent so far: charges go to the ledger before each round, epsilon is read back from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dpfed.engine.setup import Job
from dpfed.privacy.ledger import Charge, Ledger
from dpfed.privacy.views import server_epsilon, views


class Spending:
    """The run's accounts. Without privacy nothing is charged and every epsilon is None."""

    def __init__(self, job: Job, ledger: Ledger | None) -> None:
        self._job, self._ledger = job, ledger
        self._taken: Counter[int] = Counter()

    def charge(self, t: int, cohort: Sequence[int]) -> None:
        """Durable when it returns; only then may the round's noised values leave the oracle's caller."""
        job = self._job
        if self._ledger is not None:
            steps, noise = job.schedule.local_steps, job.config.run.noise
            self._ledger.charge([Charge(i, t, steps, job.plan.mechanism(i), noise) for i in cohort])
        self._taken.update(cohort)

    def so_far(self) -> float | None:
        """server_max: the largest epsilon of any client, for the rounds it really took part in."""
        job = self._job
        if not job.plan.private:
            return None
        spent = {(job.plan.mechanism(i), n) for i, n in self._taken.items()}
        steps, delta = job.schedule.local_steps, job.config.privacy.delta
        worst = {}
        for mechanism, n in spent:
            worst[mechanism] = max(n, worst.get(mechanism, 0))
        return max((server_epsilon(m, steps, n, delta) for m, n in worst.items()), default=0.0)

    def planned(self) -> dict[str, float] | None:
        """server_worst and third_party of the whole plan, for the client with the largest rate."""
        job = self._job
        if not job.plan.private:
            return None
        worst = max((job.plan.mechanism(i) for i in range(job.plan.clients)), key=lambda m: m.rate / m.noise_multiplier)
        figures = views(
            worst, job.schedule.local_steps, job.schedule.rounds, job.schedule.participation, job.config.privacy.delta
        )
        return {"server_worst": figures.server_worst, "third_party": figures.third_party}

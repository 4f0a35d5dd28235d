"""The spending of a run: its statement before round 1, charges before each round, and budgets."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dpfed.errors import DpfedError, StoppedError, counted
from dpfed.privacy.accounting.guarantee import (
    MAX_EXACT_KINDS,
    NO_PRIOR_SPENDING,
    Planned,
    PriorSpending,
    chances,
    fewest_eligible,
)
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.population import Population, largest_epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.published import show_setting
from dpfed.training.job.job import Job

# A statement contains at most this many mechanisms; more are rounded up to a grid.
MOST_KINDS = 500


@dataclass(frozen=True)
class Budget:
    """The statement of a run.

    eligible  (fewest clients to draw from, number of rounds), in order
    limits    rounds that each client's budget allows; None without a budget
    """

    planned: Planned
    eligible: list[tuple[int, int]]
    limits: np.ndarray | None

    def check(self) -> None:
        """Refuse a plan without a finite epsilon, before anything is written or released."""
        if not all(map(math.isfinite, (self.planned.server_worst, self.planned.third_party))):
            raise DpfedError(
                "this plan has no finite epsilon: more noise, fewer steps or a smaller rate are "
                "needed"
            )


def budget_of(
    plan: Plan,
    schedule: Schedule,
    delta: float,
    budget: float | None = None,
    colluding: int = 0,
    past: PriorSpending = NO_PRIOR_SPENDING,
) -> Budget:
    """Return the statement of a plan, with `past` counted for every client."""
    kinds, kind_of_client = plan.kinds()
    if len(kinds) > MOST_KINDS:
        kinds, kind_of_client = coarser(plan)
    limits = None
    if budget is not None:
        limited_kinds = kinds
        limited_kind_of_client = kind_of_client
        if len(kinds) > MAX_EXACT_KINDS:
            limited_kinds, limited_kind_of_client = coarser(plan)
        counts = [_rounds_within(kind, schedule, delta, budget, past) for kind in limited_kinds]
        limits = np.array(counts)[limited_kind_of_client]
    eligible = fewest_eligible(schedule.clients, schedule.cohort, schedule.rounds, limits)
    planned = Planned(
        tuple(kinds),
        schedule.local_steps,
        schedule.participation,
        chances(schedule.cohort, eligible, colluding),
        delta,
        plan.unit,
        past.prior,
        past.uncounted,
        int(plan.sizes.max()),
    )
    return Budget(planned, eligible, limits)


def _rounds_within(
    kind: Mechanism, schedule: Schedule, delta: float, budget: float, past: PriorSpending
) -> int:
    """Return the number of rounds that cost at most the budget."""

    def cost(rounds: int) -> float:
        return epsilon([*past.prior, (kind, schedule.local_steps * rounds)], delta).value

    return bisect_right(range(1, schedule.rounds + 1), budget, key=cost)


def coarser(plan: Plan) -> tuple[list[Mechanism], np.ndarray]:
    """Return mechanisms on a grid, and the index of each client's one.

    The mechanism of a client costs at least as much as its own.
    """
    step = 0.05
    rates = np.minimum(1.0, np.exp(np.ceil(np.log(plan.rates) / step) * step))
    noise = np.exp(np.floor(np.log(plan.multipliers) / step) * step)
    pairs, kind_of_client = np.unique(np.stack([rates, noise]), axis=1, return_inverse=True)
    kinds = [
        replace(plan.mechanism(0), rate=float(q), noise_multiplier=float(s)) for q, s in pairs.T
    ]
    return kinds, np.asarray(kind_of_client).reshape(-1)


@dataclass(frozen=True)
class RoundsCharged:
    """Rounds that were charged: per client every attempt counts; `attempts` is per round."""

    rounds_taken: np.ndarray
    attempts: dict[int, int]


def rounds_charged(ledger: Ledger, clients: int) -> RoundsCharged:
    """Count the charged rounds of a ledger; each transaction is one attempt at a round."""
    rounds_taken = np.zeros(clients, dtype=np.int64)
    cohorts = set()
    for row in ledger.rows():
        if not row.charge.void:
            rounds_taken[int(row.charge.client)] += 1
            cohorts.add((row.charge.round, row.txn))
    return RoundsCharged(rounds_taken, dict(Counter(t for t, _ in cohorts)))


class Spending:
    """The accounts of one run. Without privacy nothing is charged and there are no figures."""

    def __init__(
        self,
        job: Job,
        budget: Budget | None,
        ledger: Ledger | None,
        before: RoundsCharged | None = None,
        by_choice: bool = False,
    ) -> None:
        """With `by_choice` clients stay away as they like, so participation is not by chance."""
        self._job = job
        self._budget = budget
        self._ledger = ledger
        self._by_choice = by_choice
        before = before or RoundsCharged(np.zeros(job.plan.clients, dtype=np.int64), {})
        self.rounds_taken = before.rounds_taken.copy()
        self._attempts = dict(before.attempts)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dpfed-accounts")

    @classmethod
    def of_run(
        cls,
        job: Job,
        budget: Budget | None,
        ledger: Ledger | None,
        rounds_saved: np.ndarray | None = None,
    ) -> Self:
        """Return the accounts of a run; `rounds_saved` are the rounds taken in its checkpoint.

        Operating system noise never repeats, so every charged attempt counts. Repeated seeded noise
        counts once.
        """
        saved = None if rounds_saved is None else RoundsCharged(rounds_saved, {})
        if ledger is None:
            return cls(job, budget, None, saved, by_choice=job.served)
        charged = rounds_charged(ledger, job.plan.clients)
        if saved is not None and bool((charged.rounds_taken < saved.rounds_taken).any()):
            raise DpfedError(
                f"the ledger {ledger.path} lacks rounds that the checkpoint knows of: "
                "put back the newest copy"
            )
        return cls(job, budget, ledger, charged if job.config.run.noise == "os" else saved)

    def eligible(self) -> np.ndarray:
        """Clients whose next round stays within their budget."""
        clients = np.arange(self._job.plan.clients)
        limits = self._budget.limits if self._budget else None
        return clients if limits is None else clients[self.rounds_taken < limits]

    def enough(self, t: int) -> np.ndarray:
        """Return the eligible clients of round t; stop the run if they are too few."""
        able = self.eligible()
        needed = self._job.config.run.min_clients or self._job.schedule.cohort
        if len(able) < needed:
            budget = show_setting(self._job.config.privacy.budget or 0)
            raise StoppedError(
                f"before round {t} only {counted(len(able), 'client')} can stay within "
                f"privacy.budget = {budget} and {needed} are needed: "
                "the run ends with what it has"
            )
        return able

    def charge(self, t: int, cohort: Sequence[int]) -> None:
        """Charge a cohort; when this returns, the round's noised values may leave the oracle."""
        self.begin_charge(t, cohort)()

    def begin_charge(self, t: int, cohort: Sequence[int]) -> Callable[[], None]:
        """Charge a cohort on another thread; return a function that waits until it is on disk.

        The function raises if the charge cannot be written. Until then nothing else may use the
        ledger, and no noised value may leave the oracle.
        """
        self.rounds_taken[list(cohort)] += 1
        self._attempts[t] = self._attempts.get(t, 0) + 1
        if self._ledger is None:
            return lambda: None
        plan = self._job.plan
        steps = self._job.schedule.local_steps
        noise = self._job.config.run.noise
        charges = [Charge(i, t, steps, plan.mechanism(i), noise) for i in cohort]
        written = self._worker.submit(self._ledger.charge, charges)

        def wait_for_charge() -> None:
            written.result()

        return wait_for_charge

    def begin_server_max(self) -> Callable[[], float | None]:
        """Compute `server_max` of the rounds charged so far on the same thread."""
        return self._worker.submit(self.server_max).result

    def server_max(self) -> float | None:
        """The largest epsilon of any client, for the rounds that it took part in."""
        if self._budget is None:
            return None
        plan = self._job.plan
        steps = self._job.schedule.local_steps
        delta = self._job.config.privacy.delta
        prior = self._budget.planned.prior
        if plan.sampling == "poisson" and not prior:
            multipliers = plan.multipliers / math.sqrt(plan.releases)
            population = Population(
                plan.rates, multipliers, self.rounds_taken, steps * plan.batches
            )
            return largest_epsilon(population, delta)
        kinds, kind_of_client = plan.kinds()
        if len(kinds) > MAX_EXACT_KINDS and prior:
            # The figure of a grid might be larger than server_worst.
            return self._budget.planned.server(int(self.rounds_taken.max()))
        if len(kinds) > MAX_EXACT_KINDS:
            kinds, kind_of_client = coarser(plan)
        most = [int(self.rounds_taken[kind_of_client == k].max()) for k in range(len(kinds))]
        return max(
            epsilon([*prior, (kind, steps * n)], delta).value
            for kind, n in zip(kinds, most, strict=True)
        )

    def figures(self) -> dict[str, float | None]:
        """Planned server_worst and third_party, realised server_max; None without privacy."""
        if self._budget is None:
            return {"server_worst": None, "server_max": None, "third_party": None}
        planned = self._budget.planned
        most = self.server_max()
        worst = max(planned.server_worst, most or 0.0)
        # After a repeated attempt participation no longer follows the plan's chances.
        repeated = any(n > 1 for n in self._attempts.values())
        return {
            "server_worst": worst,
            "server_max": most,
            "third_party": worst if repeated or self._by_choice else planned.third_party,
        }

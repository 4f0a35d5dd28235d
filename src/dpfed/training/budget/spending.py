"""Track the privacy spending of a run: planned spending, charges in the ledger, and budgets."""

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
from dpfed.privacy.accounting.eligibility import chances, fewest_eligible
from dpfed.privacy.accounting.guarantee import (
    MAX_EXACT_KINDS,
    NO_PRIOR_SPENDING,
    Planned,
    PriorSpending,
)
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.population import Population, largest_epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.published import show_setting
from dpfed.training.budget.participation import eligible_clients
from dpfed.training.job.job import Job

# Largest number of different mechanisms that a ledger states for a run. If a plan has more,
# `coarser` replaces them by fewer mechanisms that cost at least as much privacy.
MOST_KINDS = 500


@dataclass(frozen=True)
class Budget:
    """The planned privacy spending of a run, fixed before round 1, and the limits of its clients.

    planned   mechanisms, rounds and delta, from which all epsilons are computed
    eligible  pairs (least number of clients to draw from, number of rounds), in the order of
              rounds. Spent privacy budgets reduce the number of clients. A cap on each client's
              rounds is not considered: with a cap, no epsilon depends on this number.
    limits    number of rounds that the privacy budget allows each client; None without a budget
    """

    planned: Planned
    eligible: list[tuple[int, int]]
    limits: np.ndarray | None

    def check(self) -> None:
        """Raise DpfedError if the plan has no finite epsilon.

        Call this before anything is written or released.
        """
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
    """Return the planned privacy spending of a run, and the limits of its clients.

    budget     largest epsilon that a client may spend; None for no limit
    colluding  number of clients that tell others in which rounds they took part
    past       privacy spent before the run, which is added to the spending of every client
    """
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
        schedule.cap,
    )
    return Budget(planned, eligible, limits)


def _rounds_within(
    kind: Mechanism, schedule: Schedule, delta: float, budget: float, past: PriorSpending
) -> int:
    """Return the largest number of rounds with this mechanism that a privacy budget allows.

    budget  largest epsilon that a client may spend
    past    privacy spent before the run
    """

    def cost(rounds: int) -> float:
        return epsilon([*past.prior, (kind, schedule.local_steps * rounds)], delta)

    return bisect_right(range(1, schedule.rounds + 1), budget, key=cost)


def coarser(plan: Plan) -> tuple[list[Mechanism], np.ndarray]:
    """Return a few mechanisms, and for each client the index of its mechanism in this list.

    These mechanisms replace those of the plan, to save time. Rates are rounded up and noise
    multipliers are rounded down. A client's new mechanism therefore costs at least as much privacy
    as its mechanism in the plan.
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
    """The numbers of rounds that were charged to the privacy ledger so far.

    rounds_taken  number of rounds of each of N clients, `[N]`; a repeated attempt counts again
    attempts      number of attempts at each round, by the round's number
    """

    rounds_taken: np.ndarray
    attempts: dict[int, int]


def rounds_charged(ledger: Ledger, clients: int) -> RoundsCharged:
    """Return the numbers of rounds and attempts that a privacy ledger has charged.

    Each transaction of the ledger is one attempt at a round. Void rows, which cost no privacy, do
    not count.
    """
    rounds_taken = np.zeros(clients, dtype=np.int64)
    cohorts = set()
    for row in ledger.rows():
        if not row.charge.void:
            rounds_taken[int(row.charge.client)] += 1
            cohorts.add((row.charge.round, row.txn))
    return RoundsCharged(rounds_taken, dict(Counter(t for t, _ in cohorts)))


class Spending:
    """The privacy spending of a run: writes charges to its ledger and computes its epsilons.

    It also finds the clients whose budgets allow another round. Without privacy nothing is
    charged, and all epsilons are None.
    """

    def __init__(
        self,
        job: Job,
        budget: Budget | None,
        ledger: Ledger | None,
        before: RoundsCharged | None = None,
        by_choice: bool = False,
    ) -> None:
        """Begin, or continue after the rounds that a resumed run has already charged.

        budget     planned spending and limits; None without privacy
        ledger     the run's ledger; None without privacy, and if clients keep their own ledgers
        before     rounds charged before; None for a new run
        by_choice  True: clients decide if they take part, so participation is not random. Somebody
                   who sees only the global models then has the same epsilon as the server.
        """
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
        """Return the spending of a new or resumed run.

        Noise of the operating system never repeats, so every charged attempt at a round counts. A
        repeated round with seeded noise has the same noise again, so this round counts once.

        rounds_saved  number of rounds of each client at the checkpoint from which the run resumes
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
        """Return the numbers of the clients that may take part in another round.

        Their privacy budget and the limit on the rounds of one client (cap) allow it.
        """
        limits = self._budget.limits if self._budget else None
        return eligible_clients(self.rounds_taken, self._job.schedule.cap, limits)

    def require_eligible(self, t: int) -> np.ndarray:
        """Return the eligible clients of round t; raise StoppedError if they are too few."""
        eligible = self.eligible()
        needed = self._job.config.run.min_clients or self._job.schedule.cohort
        if len(eligible) < needed:
            raise StoppedError(
                f"before round {t} only {counted(len(eligible), 'client')} can stay within "
                f"{self._limits_in_words()} and {needed} are needed: "
                "the run ends with what it has"
            )
        return eligible

    def _limits_in_words(self) -> str:
        budget = self._job.config.privacy.budget
        cap = self._job.schedule.cap
        limits = [] if budget is None else [f"privacy.budget = {show_setting(budget)}"]
        if cap is not None:
            limits.append(f"{counted(cap, 'round')} of a client (run.max_rounds_per_client)")
        return " and ".join(limits)

    def charge(self, t: int, cohort: Sequence[int]) -> None:
        """Write the charges of round t to the ledger, and wait until they are on disk.

        After this call the round's noised values may be released.

        cohort  numbers of the clients that take part in the round
        """
        self.begin_charge(t, cohort)()

    def begin_charge(self, t: int, cohort: Sequence[int]) -> Callable[[], None]:
        """Start to write the charges of round t on another thread; return a function that waits.

        The returned function ends when the charges are on disk, and raises an error if they cannot
        be written. Until it ends, nothing else may use the ledger, and no noised value of the round
        may be released.

        cohort  numbers of the clients that take part in the round
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
        """Start to compute `server_max`; return a function that waits for its value.

        The computation runs on the thread that writes the charges.
        """
        return self._worker.submit(self.server_max).result

    def server_max(self) -> float | None:
        """Return the largest epsilon against the server that any client has spent so far.

        Without privacy return None.
        """
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
            # Do not use the mechanisms of `coarser` here: they cost more privacy, so the result
            # could exceed the planned `server_worst`.
            return self._budget.planned.server(int(self.rounds_taken.max()))
        if len(kinds) > MAX_EXACT_KINDS:
            kinds, kind_of_client = coarser(plan)
        most = [int(self.rounds_taken[kind_of_client == k].max()) for k in range(len(kinds))]
        return max(
            epsilon([*prior, (kind, steps * n)], delta) for kind, n in zip(kinds, most, strict=True)
        )

    def figures(self) -> dict[str, float | None]:
        """Return three epsilons by name; all are None without privacy.

        server_worst  the planned epsilon against the server, or `server_max` if that is larger
        server_max    the largest epsilon that any client has spent so far
        third_party   the epsilon against somebody who sees the global models but not who took part
        """
        if self._budget is None:
            return {"server_worst": None, "server_max": None, "third_party": None}
        planned = self._budget.planned
        most = self.server_max()
        worst = max(planned.server_worst, most or 0.0)
        # The planned third_party epsilon assumes secret, random participation. It does not hold
        # with repeated rounds, a cap (public round counts), or clients that decide themselves.
        repeated = any(n > 1 for n in self._attempts.values())
        secret = not repeated and not self._by_choice and planned.cap is None
        return {
            "server_worst": worst,
            "server_max": most,
            "third_party": planned.third_party if secret else worst,
        }

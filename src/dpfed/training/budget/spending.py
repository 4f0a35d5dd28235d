"""What the clients spend: the statement is fixed before round 1, charges go to the ledger before each round, and budgets
decide who may still take part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError, StoppedError, counted
from dpfed.privacy.accounting.guarantee import (
    FEW,
    NO_PRIOR_SPENDING,
    Planned,
    Prior,
    PriorSpending,
    chances,
    fewest_eligible,
)
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.population import largest_epsilon
from dpfed.privacy.ledger.ledger import Charge, Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.published import show_setting
from dpfed.training.job.job import Job

EXTENSION = "statement"  # whose void rows say how many rounds were added: `round` clients to draw from, for `steps` rounds
MOST_KINDS = 500  # a statement names so many different mechanisms; more are rounded up to a grid


@dataclass(frozen=True)
class Budget:
    """The statement of a run and what it follows from. `limits`: rounds that each client's budget allows."""

    planned: Planned
    eligible: list[tuple[int, int]]
    limits: np.ndarray | None

    def check(self) -> None:
        """A plan that cannot be accounted for is refused before anything is written or released."""
        if not all(map(math.isfinite, (self.planned.server_worst, self.planned.third_party))):
            raise DpfedError(
                "this plan has no finite epsilon: more noise, fewer steps or a smaller rate are needed"
            )


def budget_of(
    plan: Plan,
    schedule: Schedule,
    delta: float,
    budget: float | None = None,
    colluding: int = 0,
    past: PriorSpending = NO_PRIOR_SPENDING,
) -> Budget:
    """Everything that can be said of a plan's spending in advance."""
    kinds, which = plan.kinds()
    if len(kinds) > MOST_KINDS:
        kinds, which = coarser(plan)
    limits = None
    if budget is not None:
        some, where = (kinds, which) if len(kinds) <= FEW else coarser(plan)
        limits = np.array(
            [_rounds_within(kind, schedule, delta, budget, past.prior) for kind in some]
        )[where]
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


def coarser(plan: Plan) -> tuple[list[Mechanism], np.ndarray]:
    """Mechanisms on a grid, each at least as costly as the clients' that stand for it, and which one is whose."""
    step = 0.05
    rate = np.minimum(1.0, np.exp(np.ceil(np.log(plan.rates) / step) * step))
    noise = np.exp(np.floor(np.log(plan.multipliers) / step) * step)
    pairs, which = np.unique(np.stack([rate, noise]), axis=1, return_inverse=True)
    made = [
        replace(plan.mechanism(0), rate=float(q), noise_multiplier=float(s)) for q, s in pairs.T
    ]
    return made, np.asarray(which).reshape(-1)


def _rounds_within(
    kind: Mechanism, schedule: Schedule, delta: float, budget: float, prior: Prior
) -> int:
    low, high = 0, schedule.rounds + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = epsilon([*prior, (kind, schedule.local_steps * middle)], delta).value <= budget
        low, high = (middle, high) if within else (low, middle)
    return low


def statement_of(job: Job, budget: Budget) -> dict[str, Any]:
    """What stands in a run's ledger for good: the whole statement, so that it can be read without anything else."""
    first = budget.planned.kinds[0]
    return {
        "delta": job.config.privacy.delta,
        "unit": job.plan.unit,
        "clients": job.schedule.clients,
        "cohort": job.schedule.cohort,
        "local_steps": job.schedule.local_steps,
        "sampling": first.sampling,
        "batches": first.batches,
        "releases": first.releases,
        "clip_mode": job.plan.clipping.mode,
        "kinds": [[kind.rate, kind.noise_multiplier] for kind in budget.planned.kinds],
        "eligible": [list(pair) for pair in budget.eligible],
        "prior": [[*astuple(kind), steps] for kind, steps in budget.planned.prior],
        "uncounted": budget.planned.uncounted,
    }


def open_ledger(job: Job, budget: Budget, path: Path, name: str) -> Ledger:
    """The run's new ledger."""
    return Ledger.create(path, run=name, **statement_of(job, budget))


def reopen_ledger(job: Job, budget: Budget, path: Path, name: str) -> Ledger:
    """The ledger of a run that goes on: verified, and refused if it was written under another statement."""
    ledger = Ledger.open(path, run=name)
    try:
        ledger.verify()
        statement = statement_of(job, budget)
        del statement["eligible"]  # what more rounds change
        if ledger.meta.get("uncounted") is False:
            # Ledgers of earlier versions say nothing of local weights without a record.
            del statement["uncounted"]
        for key, value in statement.items():
            if ledger.meta.get(key) != value:
                raise DpfedError(
                    f"the ledger {path} was written for another {key}: this is not the run it belongs to"
                )
        _extend(job, budget, ledger)
    except BaseException:
        ledger.close()
        raise
    return ledger


def stated_rounds(ledger: Ledger) -> list[tuple[int, int]]:
    """`eligible` of the statement: as it was before round 1, or as the last extension has it."""
    extensions: dict[int, list[tuple[int, int]]] = {}
    for row in ledger.rows():
        if row.charge.void and row.charge.client == EXTENSION:
            extensions.setdefault(row.txn, []).append((row.charge.round, row.charge.steps))
    first = [(int(n), int(count)) for n, count in ledger.meta["eligible"]]
    return extensions[max(extensions)] if extensions else first


def _extend(job: Job, budget: Budget, ledger: Ledger) -> None:
    """Rounds that are added are stated before any of them is charged, in the ledger's own chain."""
    try:
        before = stated_rounds(ledger)
    except (KeyError, TypeError, ValueError):
        raise DpfedError(
            f"the ledger {ledger.path} does not state its plan: it was not written by a run"
        ) from None
    if before == budget.eligible:
        return
    old, new = (
        np.repeat([n for n, _ in pairs], [count for _, count in pairs])
        for pairs in (before, budget.eligible)
    )
    if len(new) < len(old):
        raise DpfedError(
            f"the ledger {ledger.path} states {counted(len(old), 'round')}: go on with --set run.rounds={len(old)} or more"
        )
    if len(new) == len(old) or not np.array_equal(new[: len(old)], old):
        raise DpfedError(
            f"the ledger {ledger.path} was written for another plan: this is not the run it belongs to"
        )
    # Void rows: they are hashed and kept like charges, and nobody's spending. Killed here, the same rows are found again.
    part, kind = f"of {len(new)} rounds", job.plan.mechanism(0)
    ledger.charge(
        [Charge(EXTENSION, n, count, kind, "seeded", True, part) for n, count in budget.eligible]
    )


@dataclass(frozen=True)
class Spent:
    """taken: rounds that each client was charged for, every attempt counted; attempts: of each round, by its number."""

    taken: np.ndarray
    attempts: dict[int, int]


def spent_before(ledger: Ledger, clients: int) -> Spent:
    """From the ledger. A cohort is one transaction, and two cohorts of a round may have no client in common."""
    taken, cohorts = np.zeros(clients, dtype=np.int64), set()
    for row in ledger.rows():
        if row.charge.void:
            continue
        taken[int(row.charge.client)] += 1
        cohorts.add((row.charge.round, row.txn))
    return Spent(taken, dict(Counter(t for t, _ in cohorts)))


class Spending:
    """The run's accounts while it runs. Without privacy nothing is charged and there are no figures."""

    def __init__(
        self,
        job: Job,
        budget: Budget | None,
        ledger: Ledger | None,
        before: Spent | None = None,
        by_choice: bool = False,
    ) -> None:
        """`by_choice`: clients stay away as they like, so that nobody's part in a round is by chance (SPEC 6.2)."""
        self._job, self._budget, self._ledger, self._by_choice = job, budget, ledger, by_choice
        before = before or Spent(np.zeros(job.plan.clients, dtype=np.int64), {})
        self.taken, self._attempts = before.taken.copy(), dict(before.attempts)
        self._beside = ThreadPoolExecutor(
            1, thread_name_prefix="dpfed-accounts"
        )  # its thread ends with this object

    def eligible(self) -> np.ndarray:
        """Clients whose next round stays within their budget."""
        clients = np.arange(self._job.plan.clients)
        limits = self._budget.limits if self._budget else None
        return clients if limits is None else clients[self.taken < limits]

    def enough(self, t: int) -> np.ndarray:
        """The eligible clients, or the end of the run."""
        able = self.eligible()
        needed = self._job.config.run.min_clients or self._job.schedule.cohort
        if len(able) < needed:
            budget = show_setting(self._job.config.privacy.budget or 0)
            raise StoppedError(
                f"before round {t} only {counted(len(able), 'client')} can stay within privacy.budget = {budget} "
                f"and {needed} are needed: the run ends with what it has"
            )
        return able

    def charge(self, t: int, cohort: Sequence[int]) -> None:
        """Durable when it returns; only then may the round's noised values leave the oracle."""
        self.begin_charge(t, cohort)()

    def begin_charge(self, t: int, cohort: Sequence[int]) -> Callable[[], None]:
        """`charge` on a thread, while the device works up to its first noised value. What it returns waits for the disk,
        and raises if the charge cannot be written; nothing else may touch the ledger before."""
        charges: list[Charge] = []
        if self._ledger is not None:
            plan, steps, noise = (
                self._job.plan,
                self._job.schedule.local_steps,
                self._job.config.run.noise,
            )
            charges = [Charge(i, t, steps, plan.mechanism(i), noise) for i in cohort]
        self.taken[list(cohort)] += 1
        self._attempts[t] = self._attempts.get(t, 0) + 1
        if self._ledger is None:
            return lambda: None
        written = self._beside.submit(self._ledger.charge, charges)

        def wait_for_charge() -> None:
            written.result()

        return wait_for_charge

    def begin_server_max(self) -> Callable[[], float | None]:
        """`server_max` of the rounds charged so far, on the same thread."""
        return self._beside.submit(self.server_max).result

    def server_max(self) -> float | None:
        """The largest epsilon of any client, for the rounds it really took part in."""
        if self._budget is None:
            return None
        plan, steps, delta = (
            self._job.plan,
            self._job.schedule.local_steps,
            self._job.config.privacy.delta,
        )
        prior = self._budget.planned.prior
        if plan.sampling == "poisson" and not prior:
            releases = {"batches": plan.batches, "releases": plan.releases}
            return largest_epsilon(
                plan.rates, self.taken, steps, plan.multipliers, delta, **releases
            )
        kinds, which = plan.kinds()
        if len(kinds) > FEW and prior:
            return self._budget.planned.server(
                int(self.taken.max())
            )  # a grid's figure might pass server_worst
        if len(kinds) > FEW:
            kinds, which = coarser(plan)
        most = [int(self.taken[which == k].max()) for k in range(len(kinds))]
        return max(
            epsilon([*prior, (kind, steps * n)], delta).value
            for kind, n in zip(kinds, most, strict=True)
        )

    def figures(self) -> dict[str, float | None]:
        """server_worst and third_party of the plan, server_max of what was spent; None without privacy."""
        if self._budget is None:
            return {"server_worst": None, "server_max": None, "third_party": None}
        planned, most = self._budget.planned, self.server_max()
        worst = max(planned.server_worst, most or 0.0)
        repeated = any(
            n > 1 for n in self._attempts.values()
        )  # then who took part is no longer by the plan's chances
        return {
            "server_worst": worst,
            "server_max": most,
            "third_party": worst if repeated or self._by_choice else planned.third_party,
        }

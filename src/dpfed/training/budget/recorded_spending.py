"""Read the privacy spending of a run or of a real client from its folder.

The spending is computed from the privacy ledger. The run of a federation server has no ledger,
because each client keeps its own. The spending of such a run is bounded from its configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.eligibility import chances
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.accounting.history import History
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.population import Population, population_epsilon
from dpfed.privacy.ledger.charge import Client
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan
from dpfed.registry import registry
from dpfed.training.budget.ledgers import (
    OWN_LEDGER,
    no_statement,
    stated_rounds,
    stated_schedule,
)
from dpfed.training.budget.prior_spending import served_prior_spending
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.budget.spending import budget_of, rounds_charged
from dpfed.training.job.plan import declared_sizes, plan_for
from dpfed.training.run_folder.files import (
    COHORTS,
    CONFIG,
    LEDGER,
    RESULT,
    read_result,
    read_settings,
)

# Largest number of different histories (mechanisms and steps) whose epsilons are computed one by
# one. For more histories, one faster computation gives upper bounds of all epsilons.
MAX_EXACT_HISTORIES = 50
BY_CHOICE = "the clients of a federation stay away as they like, so it equals the server's figure"
REPEATED = "a round was attempted more than once, so it equals the server's figure"


@dataclass(frozen=True)
class RecordedSpending:
    """The privacy spending of a run, read from its folder.

    planned      everything that the run's epsilon depends on, fixed before round 1
    clients      number of clients N
    epsilons     each client's epsilon against the server, `[N]`
    rows         number of rows in the ledger
    seeded       True if the noise was repeatable, which protects nothing
    void         reason why the epsilon against a third party (somebody who sees only the global
                 models) equals the epsilon against the server; None if it may be smaller
    most_rounds  largest number of rounds charged to a client; each attempt at a round counts
    served       True for the run of a federation server, whose clients are real
    head         hash of the ledger's last row; None for a server's run, which has no ledger
    records      protected units of all clients, or an upper bound; None if unknown
    """

    planned: Planned
    clients: int
    epsilons: np.ndarray
    rows: int
    seeded: bool
    void: str | None
    most_rounds: int = 0
    served: bool = False
    head: str | None = None
    records: int | None = None

    @property
    def realised(self) -> Planned:
        """The plan, with the number of rounds that were charged if retries made it larger."""
        planned = self.planned
        if self.most_rounds <= planned.most_rounds:
            return planned
        if self.most_rounds <= planned.rounds:
            return replace(planned, cap=self.most_rounds)
        return replace(planned, chances=((1.0, self.most_rounds),), cap=None)

    @property
    def server_max(self) -> float:
        return float(self.epsilons.max(initial=0.0))

    @property
    def server_worst(self) -> float:
        """Largest epsilon of a client against the server: planned or charged, if that is larger."""
        return max(self.planned.server_worst, self.server_max)

    @property
    def third_party(self) -> float:
        return self.server_worst if self.void else self.planned.third_party


@dataclass(frozen=True)
class OwnSpending:
    """The privacy spending of one real client over all runs in which it took part.

    epsilon, delta  the guarantee after everything charged so far
    runs, rows      number of different runs, and number of rows, in the client's ledger
    void            number of rows that cost nothing, because they come from tests with seeded noise
    """

    client: str
    epsilon: float
    delta: float
    runs: int
    rows: int
    void: int


def own_ledger(path: Path) -> Path | None:
    """Return the path of a client's ledger, or None if there is none.

    `path` is the ledger itself or the client's state folder.
    """
    path = path / OWN_LEDGER if path.is_dir() else path
    return path if path.is_file() and path.name == OWN_LEDGER else None


def own_spending(path: Path) -> OwnSpending:
    """Verify the whole ledger of a real client and return its spending.

    The ledger is opened read-only, so the client may be running.
    """
    with Ledger.open(path, readonly=True) as ledger:
        ledger.verify()
        if ledger.meta.get("kind") != "client":
            raise DpfedError(f"{path} is not the ledger of a client: give a client's state folder")
        name = str(ledger.meta["owner"])
        delta = float(ledger.meta["delta"])
        rows = list(ledger.rows())
        history = ledger.history(name)
    value = epsilon(history, delta) if history else 0.0
    void = sum(row.charge.void for row in rows)
    return OwnSpending(name, value, delta, len({row.run for row in rows}), len(rows), void)


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).exists()


def read_recorded_spending(folder: Path, colluding: int = 0) -> RecordedSpending:
    """Verify the whole ledger of a run and return the run's privacy spending.

    colluding  number of clients that tell others in which rounds they took part
    """
    result = read_result(folder)
    if not isinstance(result.get("run"), str):
        raise DpfedError(
            f"{folder / RESULT} does not name the run, "
            "so its ledger cannot be trusted to be its own"
        )
    release = str(result.get("release"))
    if release == NO_PRIVACY:
        raise DpfedError(
            f"{folder} is a run without privacy: nothing in it is protected, so there is no epsilon"
        )
    seeded = release.startswith(SEEDED)
    if (folder / COHORTS).exists():
        return served_spending(folder, seeded, colluding, result.get("sigma"))
    with Ledger.open(folder / LEDGER, run=result["run"], readonly=True) as ledger:
        head = ledger.verify()
        histories = ledger.histories()
        if not histories:
            raise DpfedError(f"{folder} has an empty ledger: nothing was released yet")
        planned = _planned(folder, ledger, colluding)
        planned = replace(planned, largest=_largest(folder, result, ledger.meta))
        clients = int(ledger.meta["clients"])
        charged = rounds_charged(ledger, clients)
        seeded = seeded or any(
            row.charge.noise == "seeded" for row in ledger.rows() if not row.charge.void
        )
        epsilons = _epsilons(histories, ledger.participation(), planned, clients)
    most_steps = max(sum(steps for _, steps in history) for history in histories.values())
    repeated = any(attempts > 1 for attempts in charged.attempts.values())
    return RecordedSpending(
        planned=planned,
        clients=clients,
        epsilons=epsilons,
        most_rounds=math.ceil(most_steps / planned.local_steps),
        rows=head.rows,
        seeded=seeded,
        void=REPEATED if repeated else planned.third_party_void,
        head=head.hash,
        records=_all_records(result, planned.largest, clients),
    )


def _all_records(result: Mapping[str, Any], largest: int | None, clients: int) -> int | None:
    """Return the number of protected units (such as records) of all clients together.

    Results of older versions do not state it. Return an upper bound then, as if all clients were as
    large as the largest, or None if the largest is unknown.
    """
    stated = result.get("records")
    if isinstance(stated, int) and stated > 0:
        return stated
    return None if largest is None else largest * clients


def _largest(folder: Path, result: Mapping[str, Any], meta: Mapping[str, Any]) -> int | None:
    """Return the number of protected units (such as records) of the largest client.

    If the result of the run does not state it, it is estimated. Return None if that fails.
    """
    stated = result.get("largest_client")
    if isinstance(stated, int) and stated > 0:
        return stated
    try:
        batch = float((read_settings(folder) or {})["privacy"]["batch"])
        # The batch size divided by the sampling rate is the size of a client, or the mean size if
        # all clients have one rate. The largest client has the smallest rate.
        return max(1, math.floor(batch / min(float(rate) for rate, _ in meta["kinds"])))
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _planned(folder: Path, ledger: Ledger, colluding: int) -> Planned:
    """Return the plan that the ledger states, with all rounds that were added later."""
    meta = ledger.meta
    try:
        kinds = [
            Mechanism(meta["sampling"], q, s, meta["batches"], meta["releases"])
            for q, s in meta["kinds"]
        ]
        schedule = stated_schedule(ledger)
        return Planned(
            tuple(kinds),
            schedule.local_steps,
            schedule.participation,
            chances(schedule.cohort, stated_rounds(ledger), colluding),
            float(meta["delta"]),
            str(meta["unit"]),
            tuple((Mechanism(*kind), int(steps)) for *kind, steps in meta["prior"]),
            bool(meta["uncounted"]),
            cap=schedule.cap,
        )
    except (KeyError, TypeError, ValueError):
        raise no_statement(f"of {folder}") from None


def _epsilons(
    histories: Mapping[Client, History],
    rounds_taken: Mapping[Client, int],
    planned: Planned,
    clients: int,
) -> np.ndarray:
    """Return each client's epsilon against the server, `[clients]`.

    It includes the privacy spent on the weights from which the run started. A client without
    charges has the epsilon of these weights alone.

    histories     mechanisms and steps that were charged, by client
    rounds_taken  number of rounds that were charged, by client
    """
    prior = planned.prior
    epsilons = np.full(clients, epsilon(prior, planned.delta))
    numbers = [int(client) for client in histories]
    whole = [(*prior, *history) for history in histories.values()]
    rounds = [rounds_taken[client] for client in histories]
    one_mechanism = all(
        len(history) == 1 and history[0][1] == planned.local_steps * n
        for history, n in zip(whole, rounds, strict=True)
    )
    kinds = [history[0][0] for history in whole]
    many = len(set(whole)) > MAX_EXACT_HISTORIES
    if many and one_mechanism and kinds[0].sampling == "poisson":
        population = Population.of(kinds, rounds, planned.local_steps)
        epsilons[numbers] = population_epsilon(population, planned.delta)
    else:
        known = {history: epsilon(history, planned.delta) for history in set(whole)}
        epsilons[numbers] = [known[history] for history in whole]
    return epsilons


def served_spending(
    folder: Path, seeded: bool, colluding: int = 0, sigma: float | list[float] | None = None
) -> RecordedSpending:
    """Return an upper bound on the privacy spending of a federation server's run.

    The bound is computed from the configuration, because only the clients have ledgers. It assumes
    that every client takes part in as many rounds as the configuration allows.

    seeded     True if the noise was repeatable
    colluding  number of clients that tell others in which rounds they took part
    sigma      noise multiplier in the result of a run with a target epsilon
    """
    config = load(folder / CONFIG, [], registry())
    past = served_prior_spending(config)
    plan, schedule = plan_for(config, declared_sizes(config))
    if not plan.private:
        raise DpfedError(
            f"the configuration in {folder} is none that a server has run by: put back its {CONFIG}"
        )
    if config.privacy.target_epsilon is not None:
        plan = with_least_noise(plan, sigma)
    delta = config.privacy.delta
    budget = budget_of(plan, schedule, delta, config.privacy.budget, colluding, past)
    steps = schedule.most_rounds * schedule.local_steps
    kinds, kind_of_client = plan.kinds()
    costs = [epsilon([*past.prior, (kind, steps)], delta) for kind in kinds]
    return RecordedSpending(
        planned=budget.planned,
        clients=schedule.clients,
        epsilons=np.array(costs)[kind_of_client],
        rows=0,
        seeded=seeded,
        void=BY_CHOICE,
        most_rounds=schedule.most_rounds,
        served=True,
        records=int(plan.sizes.sum()),
    )


def with_least_noise(plan: Plan, recorded: float | list[float] | None) -> Plan:
    """Return the plan with the noise that a server's result records, if that is less noise.

    Another version of dpfed may have computed less noise for the same target epsilon. The report
    must then state the epsilon of this smaller noise. Otherwise return the plan unchanged.

    recorded  noise multiplier in the result, or (smallest, largest); None if the result has none
    """
    if recorded is None:
        return plan
    computed = np.array([plan.multipliers.min(), plan.multipliers.max()])
    ratio = float((np.broadcast_to(recorded, 2) / computed).min())
    if not 0 < ratio < 1:
        return plan
    return replace(plan, multipliers=ratio * plan.multipliers)

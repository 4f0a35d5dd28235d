"""Open or create the privacy ledger (the file of all privacy spending) of a run or a real client.

The ledger of a run contains the run's statement: everything that its epsilon depends on, fixed
before round 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError, counted
from dpfed.privacy.accounting.observers import view_epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.published import show_setting
from dpfed.training.budget.spending import Budget
from dpfed.training.job.job import Job

# File name of a real client's privacy ledger, inside the client's state folder.
OWN_LEDGER = "ledger.db"
# Client name of rows that add rounds to a run's plan and cost no privacy. In such a row, `steps` is
# a number of rounds, and `round` is the least number of clients to draw from in these rounds.
EXTENSION = "statement"
CALIBRATION_TOLERANCE = 1e-4
# Keys that ledgers of earlier versions of dpfed do not have, each with the value that was in use
# then.
ADDED = {"cohort_choice": "uniform", "max_rounds_per_client": "auto"}


def run_ledger(job: Job, budget: Budget, path: Path, name: str, released: bool = False) -> Ledger:
    """Return the open ledger of the run `name`; create it with the run's statement if missing.

    The statement has everything that the run's epsilon depends on. An existing ledger is verified.
    It is refused if its statement differs from the run's statement. If the run has more rounds than
    the ledger states, they are added to the ledger.

    released  True if a round was charged before, so that a missing ledger is an error
    """
    statement = statement_of(job, budget)
    exists = path.exists()
    lost = "what the run has spent: put it back, or begin a new run" if released else None
    ledger = _open_or_create(path, lost, statement, run=name)
    try:
        if exists:
            ledger.verify()
            _check_statement(ledger, statement)
            _extend(job, budget, ledger)
    except BaseException:
        ledger.close()
        raise
    return ledger


def client_ledger(state: Path, name: str, delta: float, unit: str, released: bool) -> Ledger:
    """Return the open ledger in a real client's state folder; create it if missing.

    name      name of the client
    unit      name of the protected unit, such as "record"
    released  True if the client has answered a server before; a missing ledger is then an error
    """
    lost = "what this client has spent: put it back" if released else None
    facts = {"delta": delta, "unit": unit}
    return _open_or_create(state / OWN_LEDGER, lost, facts, client=name)


def _open_or_create(
    path: Path,
    lost: str | None,
    statement: Mapping[str, Any],
    run: str | None = None,
    client: str | None = None,
) -> Ledger:
    """Return the open ledger at `path`; create it with `statement` if missing.

    lost       end of the error message for a missing ledger that must exist; None if it may be
               created
    statement  facts that a new ledger stores
    """
    if path.exists():
        return Ledger.open(path, run=run, client=client)
    if lost is not None:
        raise DpfedError(f"the ledger {path} is gone, and with it {lost}")
    return Ledger.create(path, run=run, client=client, **statement)


def statement_of(job: Job, budget: Budget) -> dict[str, Any]:
    """Return everything that the run's epsilon depends on, as JSON values for its ledger.

    The epsilon of the run can then be computed without any other file.
    """
    first = budget.planned.kinds[0]
    return {
        "delta": job.config.privacy.delta,
        "unit": job.plan.unit,
        "clients": job.schedule.clients,
        "cohort": job.schedule.cohort,
        "cohort_choice": job.schedule.choice,
        "max_rounds_per_client": job.schedule.max_rounds,
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


def _check_statement(ledger: Ledger, statement: dict[str, Any]) -> None:
    # Leave out `eligible` (pairs of numbers of clients and rounds) from the comparison, because it
    # changes when rounds are added to a run.
    compared = statement.keys() - {"eligible"}
    if ledger.meta.get("uncounted") is False:
        # Leave out `uncounted` from the comparison if the ledger has False. Earlier versions wrote
        # False even for starting weights of unknown privacy cost.
        compared -= {"uncounted"}
    for key in statement:
        if key in compared and ledger.meta.get(key, ADDED.get(key)) != statement[key]:
            raise DpfedError(
                f"the ledger {ledger.path} was written for another {key}: "
                "this is not the run it belongs to"
            )


def no_statement(name: object) -> DpfedError:
    return DpfedError(f"the ledger {name} does not state its plan: it was not written by a run")


def stated_schedule(ledger: Ledger) -> Schedule:
    """Return the schedule of the run (rounds, cohort size) that its ledger states.

    Rounds that were added to the run later are included.
    """
    meta = {**ADDED, **ledger.meta}
    max_rounds = meta["max_rounds_per_client"]
    return Schedule(
        clients=int(meta["clients"]),
        cohort=int(meta["cohort"]),
        rounds=sum(count for _, count in stated_rounds(ledger)),
        local_steps=int(meta["local_steps"]),
        choice=meta["cohort_choice"],
        max_rounds=max_rounds if max_rounds == "auto" else int(max_rounds),
    )


def stated_rounds(ledger: Ledger) -> list[tuple[int, int]]:
    """Return all rounds that the ledger states, as pairs (number of clients, number of rounds).

    Each pair covers consecutive rounds, whose clients are drawn from at least this many clients.
    If rounds were added to the run later, the last addition states all rounds again.
    """
    extensions: dict[int, list[tuple[int, int]]] = {}
    for row in ledger.rows():
        if row.charge.void and row.charge.client == EXTENSION:
            extensions.setdefault(row.txn, []).append((row.charge.round, row.charge.steps))
    first = [(int(n), int(count)) for n, count in ledger.meta["eligible"]]
    return extensions[max(extensions)] if extensions else first


def _extend(job: Job, budget: Budget, ledger: Ledger) -> None:
    """Write additional rounds of the run to its ledger, before any of these rounds begins.

    Raise DpfedError if the run does not begin with the rounds that the ledger states.
    """
    try:
        before = stated_rounds(ledger)
    except (KeyError, TypeError, ValueError):
        raise no_statement(ledger.path) from None
    if before == budget.eligible:
        return
    old, new = (
        np.repeat([n for n, _ in pairs], [count for _, count in pairs])
        for pairs in (before, budget.eligible)
    )
    if len(new) < len(old):
        raise DpfedError(
            f"the ledger {ledger.path} states {counted(len(old), 'round')}: "
            f"go on with run.rounds = {len(old)} or more"
        )
    if len(new) == len(old) or not np.array_equal(new[: len(old)], old):
        raise DpfedError(
            f"the ledger {ledger.path} was written for another plan: "
            "this is not the run it belongs to"
        )
    # Write the new rounds as void rows, which cost no privacy, because hashes protect rows. One
    # transaction writes all of them, so a crash leaves all or none.
    part = f"of {len(new)} rounds"
    kind = job.plan.mechanism(0)
    ledger.charge(
        [Charge(EXTENSION, n, count, kind, "seeded", True, part) for n, count in budget.eligible]
    )


def with_recorded_noise(job: Job, path: Path) -> Job:
    """Return the job with the noise multipliers that the run's ledger records.

    Another version of dpfed may compute slightly different multipliers for the same target epsilon.
    A resumed run keeps its first multipliers, so that noise and ledger agree exactly. Without a
    target epsilon or a ledger, the job is returned unchanged.
    """
    if job.config.privacy.target_epsilon is None or not path.exists():
        return job
    with Ledger.open(path, readonly=True) as ledger:
        multipliers = recorded_multipliers(job.plan, ledger)
    _require_target(job, multipliers, path)
    return replace(job, plan=replace(job.plan, multipliers=multipliers))


def _require_target(job: Job, multipliers: np.ndarray, path: Path) -> None:
    """Raise DpfedError if the noise that the ledger records is too small for the target epsilon.

    multipliers  recorded noise multiplier of each client
    path         path of the ledger
    """
    privacy = job.config.privacy
    schedule = job.schedule
    lower = multipliers < job.plan.multipliers
    for sigma in np.unique(multipliers[lower]):
        rate = float(job.plan.rates[lower & (multipliers == sigma)].max())
        worst = replace(job.plan.mechanism(0), rate=rate, noise_multiplier=float(sigma))
        rounds = schedule.rounds_for(worst, privacy.view)
        epsilon = view_epsilon(privacy.view, rounds, privacy.delta)
        if epsilon > (privacy.target_epsilon or math.inf):
            raise DpfedError(
                f"the noise that the ledger {path} records does not reach "
                f"privacy.target_epsilon = {show_setting(privacy.target_epsilon or 0)}: "
                "this is not the ledger that the run wrote"
            )


def recorded_multipliers(plan: Plan, ledger: Ledger) -> np.ndarray:
    """Return the noise multiplier of each client as the ledger records it.

    Clients of equal sampling rate have equal noise, so the noise is found by the rate. The ledger
    states rates and noise at its beginning, rounded if there are very many, and exactly in each
    charge. If the recorded and the planned multiplier differ by a relative 1e-4 or more, return the
    planned one.
    """
    try:
        noise_of_rate = {float(rate): float(noise) for rate, noise in ledger.meta["kinds"]}
    except (KeyError, TypeError, ValueError):
        raise no_statement(ledger.path) from None
    for history in ledger.histories().values():
        noise_of_rate |= {kind.rate: kind.noise_multiplier for kind, _ in history}
    multipliers = plan.multipliers.copy()
    for computed in np.unique(plan.multipliers):
        same_noise = plan.multipliers == computed
        recorded = {noise_of_rate.get(rate, math.nan) for rate in plan.rates[same_noise].tolist()}
        agreeing = [
            noise
            for noise in recorded
            if math.isclose(noise, computed, rel_tol=CALIBRATION_TOLERANCE)
        ]
        if len(agreeing) == 1:
            multipliers[same_noise] = agreeing[0]
    return multipliers

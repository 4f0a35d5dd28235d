"""Opening the privacy ledger of a run or of a real client, with the run's statement in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError, counted
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.plan import Plan
from dpfed.training.budget.spending import Budget
from dpfed.training.job.job import Job

# Name of a real client's ledger in its state folder.
OWN_LEDGER = "ledger.db"
# Client of the void rows that add rounds: `round` clients to draw from, for `steps` rounds.
EXTENSION = "statement"
CALIBRATION_TOLERANCE = 1e-4


def run_ledger(job: Job, budget: Budget, path: Path, name: str, released: bool = False) -> Ledger:
    """Open the ledger of the run `name`, or create it with the run's statement.

    With `released` a round was charged before, so the ledger must exist. An existing one is
    verified, and refused if it has another statement. Added rounds are stated in it.
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


def client_ledger(state: Path, name: str, delta: float, released: bool) -> Ledger:
    """Open the ledger in the state folder of a real client, or create it.

    With `released` the client has answered a run before, so the ledger must exist.
    """
    lost = "what this client has spent: put it back" if released else None
    return _open_or_create(state / OWN_LEDGER, lost, {"delta": delta}, client=name)


def _open_or_create(
    path: Path,
    lost: str | None,
    statement: Mapping[str, Any],
    run: str | None = None,
    client: str | None = None,
) -> Ledger:
    """Open a ledger or create it; `lost` names what a missing one would forget."""
    if path.exists():
        return Ledger.open(path, run=run, client=client)
    if lost is not None:
        raise DpfedError(f"the ledger {path} is gone, and with it {lost}")
    return Ledger.create(path, run=run, client=client, **statement)


def statement_of(job: Job, budget: Budget) -> dict[str, Any]:
    """Return the statement of a run as its ledger stores it, readable without any other file."""
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


def _check_statement(ledger: Ledger, statement: dict[str, Any]) -> None:
    # Added rounds change only the eligible clients per round.
    compared = statement.keys() - {"eligible"}
    if ledger.meta.get("uncounted") is False:
        # Earlier versions did not count local weights without a record.
        compared -= {"uncounted"}
    for key in statement:
        if key in compared and ledger.meta.get(key) != statement[key]:
            raise DpfedError(
                f"the ledger {ledger.path} was written for another {key}: "
                "this is not the run it belongs to"
            )


def no_statement(name: object) -> DpfedError:
    return DpfedError(f"the ledger {name} does not state its plan: it was not written by a run")


def stated_rounds(ledger: Ledger) -> list[tuple[int, int]]:
    """Return the stated (fewest eligible clients, number of rounds), with the last added rounds."""
    extensions: dict[int, list[tuple[int, int]]] = {}
    for row in ledger.rows():
        if row.charge.void and row.charge.client == EXTENSION:
            extensions.setdefault(row.txn, []).append((row.charge.round, row.charge.steps))
    first = [(int(n), int(count)) for n, count in ledger.meta["eligible"]]
    return extensions[max(extensions)] if extensions else first


def _extend(job: Job, budget: Budget, ledger: Ledger) -> None:
    """State added rounds in the ledger before any of them is charged."""
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
            f"go on with --set run.rounds={len(old)} or more"
        )
    if len(new) == len(old) or not np.array_equal(new[: len(old)], old):
        raise DpfedError(
            f"the ledger {ledger.path} was written for another plan: "
            "this is not the run it belongs to"
        )
    # Void rows are hashed like charges but cost nothing. After a crash the same rows are found.
    part = f"of {len(new)} rounds"
    kind = job.plan.mechanism(0)
    ledger.charge(
        [Charge(EXTENSION, n, count, kind, "seeded", True, part) for n, count in budget.eligible]
    )


def with_recorded_noise(job: Job, path: Path) -> Job:
    """Return the job with the noise multipliers that the ledger of a calibrated run records.

    Another version may calibrate slightly different multipliers for the same target. A run resumes
    with those it began with, so that oracle, ledger and statement agree bit for bit.
    """
    if job.config.privacy.target_epsilon is None or not path.exists():
        return job
    with Ledger.open(path, readonly=True) as ledger:
        multipliers = recorded_multipliers(job.plan, ledger)
    return replace(job, plan=replace(job.plan, multipliers=multipliers))


def recorded_multipliers(plan: Plan, ledger: Ledger) -> np.ndarray:
    """Return one noise multiplier per client: the recorded one, or the plan's without a match.

    They must agree to 1e-4. Clients of equal rate have equal noise, so a record is found by its
    rate. A statement of very many rates is rounded to a grid; then the charged rows are used.
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

"""A whole run: job, folder, ledger, round loop, result. What the command line and the Python interface both call."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.engine.fleet import Fleet
from dpfed.engine.folder import RunFolder, fresh_folder, refuse_occupied
from dpfed.engine.rounds import Round, train
from dpfed.engine.setup import Job, prepare
from dpfed.engine.spending import Spending, budget_of, open_ledger
from dpfed.errors import DivergedError, StoppedError
from dpfed.privacy.statement import assumptions

SIMULATION = "simulation: not for release"
NO_PRIVACY = "no privacy"
RELEASABLE = (
    "the model may be released under its privacy statement; metrics, ledger and figures are for the server only"
)


def release_note(config: Config, private: bool) -> str:
    """What every artefact of a run says about whether it may leave the house."""
    if not private:
        return NO_PRIVACY
    return SIMULATION if config.run.noise == "seeded" else RELEASABLE


def run(
    config: Config,
    out: Path | None = None,
    force: bool = False,
    source: Source | None = None,
    begin: Callable[[Job], None] = lambda job: None,
    observe: Callable[[Round], None] = lambda round: None,
) -> dict[str, Any]:
    """Trains by the configuration and returns the result; the folder `out` holds all of it.

    `begin` is told of the job before round 1, `observe` of round 0 (before training) and of each round.
    """
    out = out or fresh_folder(config)
    refuse_occupied(out, force)
    job = prepare(config, source)
    budget = None
    if job.plan.private:
        budget = budget_of(job.plan, job.schedule, config.privacy.delta, config.privacy.budget)
        budget.check()
    note = release_note(config, job.plan.private)
    folder = RunFolder(out, config, note, force)
    seen: list[Round] = []

    def watch(round: Round) -> None:
        seen[:] = [seen[0] if seen else round, round]
        folder.log(round)
        observe(round)

    name = uuid.uuid4().hex
    folder.begin(name, note)
    ledger = open_ledger(job, budget, folder.ledger, name) if budget else None
    try:
        begin(job)
        spending = Spending(job, budget, ledger)
        try:
            train(job, Fleet(job), spending, watch)
        except StoppedError as error:
            folder.save_model(seen[-1].theta, job.space, note)
            kept = result_of(job, spending, seen, folder.path, note)
            diverged = isinstance(error, DivergedError)
            folder.save_result({"run": name, "state": "stopped", **kept, "stopped": str(error), "diverged": diverged})
            raise
        result = result_of(job, spending, seen, folder.path, note)
        folder.save_model(seen[-1].theta, job.space, note)
        folder.save_result({"run": name, "state": "finished", **result})
        return result
    finally:
        folder.close()
        if ledger is not None:
            ledger.close()


def result_of(job: Job, spending: Spending, seen: list[Round], out: Path, note: str) -> dict[str, Any]:
    """The JSON object of `dpfed run --json`. Without privacy epsilon is null, never a number."""
    last = seen[-1]
    multipliers = job.plan.multipliers
    return {
        "test_accuracy": last.accuracy,
        "test_loss": last.loss if last.loss is None or math.isfinite(last.loss) else None,
        "test_records": len(job.test.labels),
        "start_accuracy": seen[0].accuracy,
        "epsilon": spending.figures(),
        "delta": job.config.privacy.delta if job.plan.private else None,
        "sigma": [float(multipliers.min()), float(multipliers.max())] if np.ptp(multipliers) else float(multipliers[0]),
        "guarantee": guarantee(job),
        "release": note,
        "algorithm": job.algorithm.name,
        "parameters": job.space.size,
        "blocks": job.space.num_blocks,
        "seed": job.config.run.seed,
        "rounds": last.t,
        "seconds": last.seconds,
        "out": str(out),
    }


def guarantee(job: Job) -> str:
    """The sentence without which an epsilon means nothing."""
    if not job.plan.private:
        return NO_PRIVACY
    return assumptions(job.plan.kinds()[0], job.config.privacy.delta, job.plan.unit)

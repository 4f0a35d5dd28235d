"""A whole run: job, folder, ledger, round loop, result. What the command line and the Python interface both call."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.errors import DivergedError, DpfedError, InterruptedRunError, StoppedError
from dpfed.privacy.accounting.guarantee import PriorSpending, assumptions, refuse_large_delta
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.noise import Streams
from dpfed.training.backends.batched_runs import BatchedRun
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.fleet import Fleet
from dpfed.training.backends.torchrun import Distributed, Group, agree, follow
from dpfed.training.budget.prior_spending import prior_spending_of, served_prior_spending
from dpfed.training.budget.recorded_spending import NO_PRIVACY, SEEDED
from dpfed.training.budget.spending import (
    Budget,
    Spending,
    Spent,
    budget_of,
    open_ledger,
    reopen_ledger,
    spent_before,
)
from dpfed.training.callbacks.activity import OnActivity, ignore
from dpfed.training.callbacks.diagnostics import Diagnostics, refuse_real_noise
from dpfed.training.callbacks.trackers import Trackers, refuse_missing
from dpfed.training.evaluation import task_metrics
from dpfed.training.job.job import Job, prepare, prepare_server
from dpfed.training.job.job_cache import JobCache
from dpfed.training.job.message_size import traffic
from dpfed.training.job.notes import result_warnings
from dpfed.training.job.plan import client_names
from dpfed.training.round_loop import Backend, Progress, RemoteBackend, Round, first_state, train
from dpfed.training.run_folder.checkpoint import Checkpoints, Saved, job_hash
from dpfed.training.run_folder.files import read_result
from dpfed.training.run_folder.folder import RunFolder, fresh_folder, refuse_occupied
from dpfed.training.run_folder.label_counts import write_label_counts
from dpfed.training.run_folder.resume import (
    changes,
    fixed_settings,
    name_of,
    refuse_kind,
    refuse_other,
)

Serve = Callable[[Job, str], RemoteBackend]
SELDOM = 1.0  # seconds between checkpoints of a simulation on a GPU, whose rounds may take less than writing one

SIMULATION = f"{SEEDED}: not for release"
RELEASABLE = "the model may be released under its privacy statement; all else in the folder is for the server only"


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
    resume: bool = False,
    stop: Callable[[], None] = lambda: None,
    group: Group | None = None,
    serve: Serve | None = None,
    place: BatchedRun | None = None,
    shared: JobCache | None = None,
    on_activity: OnActivity = ignore,
) -> dict[str, Any]:
    """Trains by the configuration and returns the result; the folder `out` holds all of it.

    `begin` is told of the job before round 1, `observe` of round 0 (before training) and of each round. With `resume`
    the run in `out` goes on where its last checkpoint is. `stop` is called between local steps, and raises
    InterruptedRunError to end the run. With `group` this process leads others, which call `assist`. With `serve`
    the clients are elsewhere: it makes the backend from the job and the run's name, no private record is read here, the
    ledgers are the clients' own, and there is a checkpoint after every round, as they store only their last messages.
    With `place` it is one of several runs in threads that compute gradients together (packed.py); with `shared` it takes
    over records, frozen model and features of the run before it, where they are the same. `on_activity` is called
    with progress inside a round and before the first one.
    """
    refuse_real_noise(config)
    refuse_missing(config)
    out = out or fresh_folder(config)
    _refuse_folder(out, config, force, resume, serve is not None)
    past = served_prior_spending(config) if serve else prior_spending_of(config)
    refuse_target(config, past)
    kept = place.shared if place else shared
    job = prepare_server(config) if serve else prepare(config, source, kept, on_activity)
    job = replace(
        job,
        past=past,
        batched_sum=place.join_batch(job) if place else None,
        on_activity=on_activity,
    )
    job.notes.extend(past.notes)
    if group is not None:
        agree(job, group)
    budget = _checked_budget(job, resume) if job.plan.private else None
    note = release_note(config, job.plan.private)
    name = name_of(out) if resume else uuid.uuid4().hex
    folder = RunFolder(out, config, note, force, resume)
    trackers = Trackers(config, out, budget.planned if budget else None)
    try:
        if resume:
            refuse_other(out, config)  # again, now that nobody else is at work here
        else:
            folder.begin(name, note)
            if serve is None:
                write_label_counts(out, job)
        if serve:
            job = replace(
                job, streams=Streams(config.run.seed, job.streams.secret, folder.cohort_key())
            )
        told = trackers.beside(observe)
        return trackers.end(
            _train(job, budget, folder, name, note, begin, told, resume, stop, group, serve)
        )
    finally:
        trackers.finish()
        folder.close()


def _checked_budget(job: Job, resume: bool) -> Budget:
    """Return the statement of a private run; refuse one without an epsilon, or with a large delta if it is new."""
    privacy = job.config.privacy
    budget = budget_of(job.plan, job.schedule, privacy.delta, privacy.budget, past=job.past)
    budget.check()
    if not resume:
        largest = int(job.plan.sizes.max())
        refuse_large_delta(privacy.delta, largest, job.plan.unit, bool(privacy.allow_large_delta))
    return budget


def _refuse_folder(out: Path, config: Config, force: bool, resume: bool, served: bool) -> None:
    if resume:
        refuse_other(out, config)
        refuse_kind(out, served)
    else:
        refuse_occupied(out, force)


def assist(config: Config, group: Group, source: Source | None = None) -> None:
    """What every process but the leading one does instead of `run`: its share of each round, and no files."""
    follow(prepare(config, source), group)


def _train(
    job: Job,
    budget: Budget | None,
    folder: RunFolder,
    name: str,
    note: str,
    begin: Callable[[Job], None],
    observe: Callable[[Round], None],
    resume: bool,
    stop: Callable[[], None],
    group: Group | None,
    serve: Serve | None,
) -> dict[str, Any]:
    memory = _memory(job, folder)
    checkpoints = Checkpoints(folder.checkpoints, job_hash(follows_from(job), job.theta), memory)
    remote = serve(job, name) if serve else None
    # The ledger first: its lock refuses a run that is still going on, before anything of that run is touched.
    ledger = _ledger(job, budget, folder, name, resume) if budget and not remote else None
    try:
        saved = _go_on(job, folder, checkpoints, remote) if resume else None
        spending = _spending(job, budget, ledger, saved)
        if resume:
            _amend(folder, job, name, note, saved)
        begin(job)
        seen = folder.rounds(saved.progress.t, saved.progress.state.result) if saved else []
        diagnostics = Diagnostics(folder.path, job) if job.config.run.diagnostics else None

        def watch(round: Round) -> None:
            seen[:] = [seen[0] if seen else round, round]
            folder.log(round)
            if diagnostics is not None:
                diagnostics.write(round.t)
            observe(round)

        def finish(state: str, **more: Any) -> dict[str, Any]:
            result = result_of(job, spending, seen, folder.path, note) | (
                remote.report() if remote else {}
            )
            result["metrics"] = task_metrics(job, seen[-1].theta)
            result["notes"] = list(job.notes)
            result["warnings"] = [*job.warnings, *result_warnings(result)]
            folder.save_model(seen[-1].theta, job.space, note)
            folder.save_result({"run": name, "state": state, **result, **more})
            return result

        late = not (remote or group or diagnostics) and may_tell_late(job)
        backend = remote or _backend(job, memory, diagnostics, stop, group, late)
        keep, due = _keeper(checkpoints, spending, folder, remote), due_of(job, remote)
        progress = saved.progress if saved else None
        try:
            with checkpoints:  # whatever ends the rounds, the last checkpoint is complete
                train(job, backend, spending, watch, progress, keep, stop, due, late)
        except InterruptedRunError as error:
            raise _interrupted(error, folder, name, note, seen, job.served) from None
        except StoppedError as error:
            finish("stopped", stopped=str(error), diverged=isinstance(error, DivergedError))
            raise
        return finish("finished")
    finally:
        if ledger is not None:
            ledger.close()


def _keeper(
    checkpoints: Checkpoints, spending: Spending, folder: RunFolder, remote: RemoteBackend | None
) -> Callable[[Progress], None]:
    def keep(progress: Progress) -> None:
        known = remote.after(progress.t, progress.state) if remote else None
        # remote clients keep only their last messages: nothing may lag
        checkpoints.save_beside(
            progress, spending.taken, known, folder.sync, wait=remote is not None
        )

    return keep


def _backend(
    job: Job,
    memory: ClientStates,
    diagnostics: Diagnostics | None,
    stop: Callable[[], None],
    group: Group | None,
    late: bool,
) -> Backend:
    """What computes cohorts: a fleet in this process, or the processes that this one leads."""
    if group is not None:
        return Distributed(job, group, memory)
    return Fleet(job, memory, diagnostics.watch if diagnostics else None, stop, late)


def may_tell_late(job: Job) -> bool:
    """On a GPU, but with real noise no round may be paid for that the answer about the one before would have saved."""
    return job.device.type == "cuda" and job.config.run.noise != "os"


def due_of(job: Job, remote: RemoteBackend | None) -> Callable[[int], bool]:
    return (lambda t: True) if remote else checkpoints_due(job)


def checkpoints_due(job: Job, clock: Callable[[], float] = time.monotonic) -> Callable[[int], bool]:
    """After which rounds there is a checkpoint; asked once for each round."""
    run, every = job.config.run, job.config.run.checkpoint_every
    if every != "auto":
        return lambda t: every > 0 and t % every == 0
    if (
        job.device.type != "cuda" or run.noise == "os"
    ):  # a round that is repeated would cost privacy again
        return lambda t: True
    last = clock()

    def due(t: int) -> bool:
        nonlocal last
        now = clock()
        if now - last < SELDOM and t < run.rounds:
            return False
        last = now
        return True

    return due


def _ledger(job: Job, budget: Budget, folder: RunFolder, name: str, resume: bool) -> Ledger:
    if resume and folder.ledger.exists():
        return reopen_ledger(job, budget, folder.ledger, name)
    if resume and folder.last_round() > 0:
        raise DpfedError(
            f"the ledger {folder.ledger} is gone, and with it what the run has spent: put it back, or begin a new run"
        )
    return open_ledger(job, budget, folder.ledger, name)


def _memory(job: Job, folder: RunFolder) -> ClientStates:
    names = (
        () if job.served else job.algorithm.remembers
    )  # real clients keep their memory themselves
    return ClientStates(
        names, job.space.size, folder.checkpoints / "memory", job.config.run.memory_limit << 20
    )


def _go_on(
    job: Job, folder: RunFolder, checkpoints: Checkpoints, remote: RemoteBackend | None = None
) -> Saved | None:
    """The newest whole checkpoint, or None if the run had not come to its first."""
    saved, damaged = checkpoints.load(first_state(job))
    if saved is None and damaged:
        raise DpfedError(f"{folder.path} cannot go on: {damaged[0]}")
    job.notes.extend(f"{sentence}; the one before it is used" for sentence in damaged)
    folder.rewind(saved.progress.t if saved else -1)
    if remote is not None and saved is not None:
        remote.restore(saved.backend)
    return saved


def _amend(folder: RunFolder, job: Job, name: str, note: str, saved: Saved | None) -> None:
    """Records what changed. After the ledger: killed in between, the run has stated too much and not too little."""
    folder.amend(job.config, changes(folder.path, job.config), saved.progress.t if saved else 0)
    if read_result(folder.path).get("state") != "running":
        folder.begin(name, note)


def _interrupted(
    error: InterruptedRunError,
    folder: RunFolder,
    name: str,
    note: str,
    seen: list[Round],
    served: bool,
) -> InterruptedRunError:
    after = f"after round {seen[-1].t}" if seen else "before round 1"
    command = "dpfed server --resume --out" if served else "dpfed run --resume"
    sentence = f"stopped by {error.signal} {after}; go on with `{command} {folder.path}`"
    folder.save_result({"run": name, "state": "interrupted", "release": note, "stopped": sentence})
    return InterruptedRunError(error.signal, error.number, sentence)


def _spending(
    job: Job, budget: Budget | None, ledger: Ledger | None, saved: Saved | None
) -> Spending:
    """What was spent before counts. Noise that never comes twice was spent for every attempt, seeded noise once."""
    kept = Spent(saved.taken, {}) if saved else None
    if ledger is None:
        return Spending(job, budget, ledger, kept, by_choice=job.served)
    charged = spent_before(ledger, job.plan.clients)
    if kept is not None and bool((charged.taken < kept.taken).any()):
        raise DpfedError(
            f"the ledger {ledger.path} lacks rounds that the checkpoint knows of: put back the newest copy"
        )
    return Spending(job, budget, ledger, charged if job.config.run.noise == "os" else kept)


def refuse_target(config: Config, past: PriorSpending) -> None:
    if past.prior and config.privacy.target_epsilon is not None:
        raise DpfedError(
            "what the run starts from, or counts on held-out records, cost privacy too, and a target would be passed: give "
            "privacy.sigma, and privacy.budget for what no client may pass in all"
        )


def follows_from(job: Job) -> dict[str, Any]:
    """The settings and what else decides a run's numbers: seeded noise is drawn differently by another kind of device."""
    more = {"served": True} if job.served else {}
    return {
        **fixed_settings(job.config),
        "sizes": job.plan.sizes.tolist(),
        "device": job.device.type,
        **more,
    }


def result_of(
    job: Job, spending: Spending, seen: list[Round], out: Path, note: str
) -> dict[str, Any]:
    """The JSON object of `dpfed run --json`. Without privacy epsilon is null, never a number."""
    last = seen[-1]
    multipliers = job.plan.multipliers
    return {
        "test_accuracy": last.accuracy,
        **({"last_accuracy": last.last_accuracy} if job.config.run.average else {}),
        "test_loss": last.loss if last.loss is None or math.isfinite(last.loss) else None,
        "test_records": len(job.test.labels),
        "start_accuracy": seen[0].accuracy,
        "epsilon": spending.figures(),
        "delta": job.config.privacy.delta if job.plan.private else None,
        "sigma": [float(multipliers.min()), float(multipliers.max())]
        if np.ptp(multipliers)
        else float(multipliers[0]),
        "guarantee": guarantee(job),
        "release": note,
        "algorithm": job.algorithm.name,
        "clients": job.schedule.clients,
        "client_names": client_names(job.config) if job.served else list(job.shards.names),
        "largest_client": int(job.plan.sizes.max()),
        "classes": list(job.classes),
        "input": asdict(job.spec),
        "parameters": job.space.size,
        "blocks": job.space.num_blocks,
        "traffic": traffic(job.algorithm, job.space).as_dict(),
        "seed": job.config.run.seed,
        "rounds": last.t,
        "seconds": last.seconds,
        "out": str(out),
        **({"served": True} if job.served else {}),
    }


def guarantee(job: Job) -> str:
    """The sentence without which an epsilon means nothing."""
    if not job.plan.private:
        return NO_PRIVACY
    past = job.past
    return assumptions(
        job.plan.kinds()[0], job.config.privacy.delta, job.plan.unit, past.prior, past.uncounted
    )

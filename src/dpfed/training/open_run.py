"""Open a new or resumed run: its folder, ledger, checkpoints, backend and callbacks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpfed.config import Config
from dpfed.errors import DpfedError, InterruptedRunError, phrase
from dpfed.privacy.accounting.guarantee import refuse_large_delta
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.execution import Execution
from dpfed.training.budget.ledgers import run_ledger, with_recorded_noise
from dpfed.training.budget.spending import Budget, Spending, budget_of
from dpfed.training.callbacks.base import Callback, Callbacks
from dpfed.training.callbacks.checkpoints import CheckpointWriter, checkpoints_due
from dpfed.training.callbacks.diagnostics import Diagnostics, refuse_real_noise
from dpfed.training.callbacks.metrics_file import MetricsFile
from dpfed.training.callbacks.trackers import Trackers, refuse_missing
from dpfed.training.evaluation import task_metrics
from dpfed.training.job.examples import examples_of
from dpfed.training.job.job import Job
from dpfed.training.job.notes import result_warnings
from dpfed.training.job.public_score import choice_notes, choice_of, kept_round, refuse_metric
from dpfed.training.result import release_note, result_of
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import RoundLoop
from dpfed.training.run_folder.checkpoint import Checkpoints, LoadedCheckpoint, job_hash
from dpfed.training.run_folder.files import LEDGER, read_result
from dpfed.training.run_folder.folder import RunFolder, refuse_occupied
from dpfed.training.run_folder.label_counts import write_label_counts
from dpfed.training.run_folder.resume import changes, refuse_kind, refuse_other, run_name
from dpfed.training.run_folder.run_identity import run_identity

Mode = Literal["new", "replace", "resume"]
"""How a run starts: in a new folder, in place of the run in its folder, or by resuming it."""


@dataclass(frozen=True)
class RunPlace:
    """The name and the folder of an open run.

    name    random identifier of the run, stored in run.json
    note    sentence that says if the results may be released
    folder  the run folder, locked for this process
    resume  True if the run continues an earlier run
    """

    name: str
    note: str
    folder: RunFolder
    resume: bool


@dataclass(frozen=True)
class OpenRun:
    """A run that is ready to train, with everything that its end needs.

    place        name and folder of the run
    loop         runs the rounds
    metrics      keeps the first and the last reported round
    checkpoints  writes and reads checkpoints
    saved        the checkpoint to resume from; None if training begins at round 1
    remote       the backend of clients on a network; None for simulated clients
    """

    place: RunPlace
    loop: RoundLoop
    metrics: MetricsFile
    checkpoints: Checkpoints
    saved: LoadedCheckpoint | None
    remote: Any

    @property
    def job(self) -> Job:
        return self.loop.job

    def finish(self, state: str, **more: Any) -> dict[str, Any]:
        """Write the trained vector and the result to the run folder, and return the result.

        state  how the run ended, "finished" or "stopped"
        more   further entries for run.json
        """
        folder = self.place.folder
        rounds = [self.metrics.rounds[0], kept_round(self.job, self.metrics.rounds[-1])]
        result = result_of(self.job, self.loop.spending, rounds, folder.path, self.place.note)
        if self.remote is not None:
            result |= self.remote.report()
        result["metrics"] = task_metrics(self.job, rounds[-1].theta)
        result |= choice_of(self.job, rounds[-1])
        examples = examples_of(self.job, rounds[-1].theta)
        if examples.texts:
            result["examples"] = examples.texts
        notes = [*choice_notes(self.job, rounds[-1]), *examples.notes]
        result["notes"] = [*self.job.notes, *notes]
        result["warnings"] = [*self.job.warnings, *result_warnings(result)]
        folder.save_model(rounds[-1].theta, self.job.space, self.place.note)
        folder.save_result({"run": self.place.name, "state": state, **result, **more})
        return result

    def interrupted(self, error: InterruptedRunError) -> InterruptedRunError:
        """Write to run.json that a signal stopped the run; return the error to raise."""
        rounds = self.metrics.rounds
        after = f"after round {rounds[-1].t}" if rounds else "before round 1"
        folder = self.place.folder
        command = phrase("resume server" if self.job.served else "resume").format(folder.path)
        sentence = f"stopped by {error.signal} {after}; go on with {command}"
        result = {"run": self.place.name, "state": "interrupted", "release": self.place.note}
        folder.save_result({**result, "stopped": sentence})
        return InterruptedRunError(error.signal, error.number, sentence)


def refuse_start(config: Config, out: Path, mode: Mode, served: bool) -> None:
    """Raise DpfedError if a run cannot start in the folder `out`, before anything is computed.

    served  True if the clients are on a network
    """
    refuse_real_noise(config)
    refuse_missing(config)
    if mode == "resume":
        refuse_other(out, config)
        refuse_kind(out, served)
    else:
        refuse_occupied(out, force=mode == "replace")


@contextmanager
def open_run(
    job: Job, out: Path, mode: Mode, execution: Execution, watchers: Callbacks
) -> Iterator[OpenRun]:
    """Yield the run, ready to train. Run folder and ledger stay locked until the context ends.

    job       the job of the run
    out       the run folder
    watchers  callbacks of the caller
    """
    resume = mode == "resume"
    if resume and not job.served:
        job = with_recorded_noise(job, out / LEDGER)
    execution.confirm(job)
    refuse_metric(job)
    budget = _checked_budget(job, resume) if job.plan.private else None
    note = release_note(job.config, job.plan.private)
    name = run_name(out) if resume else uuid.uuid4().hex
    with ExitStack() as stack:
        folder = RunFolder(out, job.config, note, mode == "replace", resume)
        stack.callback(folder.close)
        trackers = Trackers(job.config, out, budget.planned if budget else None)
        stack.callback(trackers.close)
        if resume:
            # Compare the settings again, because before this lock another process may have resumed
            # the run with other settings.
            refuse_other(out, job.config)
        else:
            folder.begin(name, note)
            if not job.served:
                write_label_counts(out, job)
        job = execution.bind(job, folder)
        place = RunPlace(name, note, folder, resume)
        ledger: Ledger | None = None
        # Opening the ledger locks it, and fails if another process still trains this run. Open it
        # before the checkpoints are read.
        if budget is not None and not job.served:
            released = resume and folder.last_round() > 0
            ledger = run_ledger(job, budget, folder.ledger, name, released)
            stack.callback(ledger.close)
        yield _ready(job, place, (budget, ledger), execution, [trackers, watchers])


def _ready(
    job: Job,
    place: RunPlace,
    accounts: tuple[Budget | None, Ledger | None],
    execution: Execution,
    watchers: Sequence[Callback],
) -> OpenRun:
    """Build backend, checkpoints and callbacks of a run, and return the run ready to train.

    A resumed run continues from its newest checkpoint.

    accounts  pair of planned spending and ledger; both are None without privacy
    """
    folder = place.folder
    states = _client_states(job, folder)
    diagnostics = [Diagnostics(folder.path, job)] if job.config.run.diagnostics else []
    overlap = execution.overlaps and not diagnostics and may_overlap(job)
    watch = diagnostics[0].watch if diagnostics else None
    backend = execution.backend(job, place.name, states, watch, overlap)
    remote: Any = backend if job.served else None
    checkpoints = Checkpoints(folder.checkpoints, job_hash(run_identity(job), job.theta), states)
    saved = _load_checkpoint(job, folder, checkpoints, remote) if place.resume else None
    spending = Spending.of_run(job, *accounts, saved.rounds_taken if saved else None)
    if place.resume:
        _record_changes(job, place, saved)
    rounds = folder.rounds(saved.progress.t, saved.progress.state) if saved else []
    metrics = MetricsFile(folder, rounds)
    writer = CheckpointWriter(checkpoints, spending, folder, remote)
    loop = RoundLoop(
        job=job,
        backend=backend,
        spending=spending,
        callbacks=Callbacks([metrics, *diagnostics, *watchers, writer]),
        stop=execution.stop,
        checkpoint_due=checkpoints_due(job),
        overlap=overlap,
    )
    return OpenRun(place, loop, metrics, checkpoints, saved, remote)


def may_overlap(job: Job) -> bool:
    """Return True if a round may begin before the previous round is checked for NaN and infinity.

    Return False with secret noise (`run.noise = "os"`). With overlap, a failed check would end the
    run after the ledger is charged for a next round that is of no use.
    """
    return job.device.type == "cuda" and job.config.run.noise != "os"


def _checked_budget(job: Job, resume: bool) -> Budget:
    """Return the planned privacy spending of a run.

    Raise DpfedError if the plan has no finite epsilon, or if the delta of a new run is too large.
    """
    privacy = job.config.privacy
    budget = budget_of(job.plan, job.schedule, privacy.delta, privacy.budget, past=job.past)
    budget.check()
    if not resume:
        largest = int(job.plan.sizes.max())
        refuse_large_delta(privacy.delta, largest, job.plan.unit, bool(privacy.allow_large_delta))
    return budget


def _client_states(job: Job, folder: RunFolder) -> ClientStates:
    """Return the store of the vectors that simulated clients keep between rounds.

    It stays empty for clients on a network, because they store their vectors themselves.
    """
    names = () if job.served else job.algorithm.remembers
    limit = job.config.run.memory_limit << 20
    return ClientStates(names, job.space.size, folder.checkpoints / "memory", limit)


def _load_checkpoint(
    job: Job, folder: RunFolder, checkpoints: Checkpoints, remote: Any
) -> LoadedCheckpoint | None:
    """Return the newest complete checkpoint, or None if the run stopped before writing one.

    Metrics of rounds after the checkpoint are deleted, because the run computes these rounds again.
    """
    saved, damaged = checkpoints.load(first_state(job))
    if saved is None and damaged:
        raise DpfedError(f"{folder.path} cannot go on: {damaged[0]}")
    job.notes.extend(f"{sentence}; the one before it is used" for sentence in damaged)
    folder.rewind(saved.progress.t if saved else -1)
    if remote is not None and saved is not None:
        remote.restore(saved.backend)
    return saved


def _record_changes(job: Job, place: RunPlace, saved: LoadedCheckpoint | None) -> None:
    """Write the settings that changed when the run was resumed into the run folder.

    Call this after opening the ledger. If rounds are added, the ledger must state them before the
    run folder does.
    """
    folder = place.folder
    folder.amend(job.config, changes(folder.path, job.config), saved.progress.t if saved else 0)
    if read_result(folder.path).get("state") != "running":
        folder.begin(place.name, place.note)

"""Where the clients of a run compute: this process, a pack of runs, torchrun, or a network.

An execution builds the job and the backend. Everything else of a run is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.privacy.accounting.guarantee import PriorSpending
from dpfed.privacy.noise import Streams
from dpfed.training.backends.base import Backend, RemoteBackend
from dpfed.training.backends.batched_runs import BatchedRun
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.fleet import Fleet, LocalWatch
from dpfed.training.backends.torchrun import Distributed, Group, agree
from dpfed.training.budget.prior_spending import (
    prior_spending_of,
    refuse_target,
    served_prior_spending,
)
from dpfed.training.callbacks.activity import OnActivity
from dpfed.training.job.job import Job, prepare, prepare_server
from dpfed.training.job.job_cache import JobCache
from dpfed.training.run_folder.folder import RunFolder

Stop = Callable[[], None]


def never_stop() -> None:
    """Let the run continue."""


class Execution(Protocol):
    """Build the job and the backend of a run.

    served    the clients and their records are elsewhere
    overlaps  rounds may overlap on a GPU; see `RoundLoop.overlap`
    stop      is called between local steps; it may raise to end the run
    confirm   compares the job with other processes, before anything is written
    bind      adds to the job what its folder holds
    """

    served: ClassVar[bool]
    overlaps: ClassVar[bool]

    @property
    def stop(self) -> Stop: ...

    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job: ...

    def confirm(self, job: Job) -> None: ...

    def bind(self, job: Job, folder: RunFolder) -> Job: ...

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> Backend: ...


@dataclass(frozen=True)
class InProcess:
    """Compute in this process.

    cache  records, frozen model and features of an earlier run, used where they are the same
    batch  the run's place among runs that compute gradients together (`batched_runs`)
    """

    served: ClassVar[bool] = False
    overlaps: ClassVar[bool] = True

    stop: Stop = never_stop
    cache: JobCache | None = None
    batch: BatchedRun | None = None

    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job:
        cache = self.batch.shared if self.batch else self.cache
        past = prior_spending_of(config)
        refuse_target(config, past)
        job = prepare(config, source, cache, on_activity)
        if self.batch is not None:
            job = replace(job, batched_sum=self.batch.join_batch(job))
        return _with_past(job, past, on_activity)

    def confirm(self, job: Job) -> None:
        """Nothing to confirm with other processes."""

    def bind(self, job: Job, folder: RunFolder) -> Job:
        return job

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> Backend:
        return Fleet(job, states, watch, self.stop, check_messages=not overlap)


@dataclass(frozen=True)
class Torchrun:
    """Compute on several processes that this one leads; the others call `assist`."""

    served: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False

    group: Group
    stop: Stop = never_stop

    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job:
        return InProcess().prepare(config, source, on_activity)

    def confirm(self, job: Job) -> None:
        agree(job, self.group)

    def bind(self, job: Job, folder: RunFolder) -> Job:
        return job

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> Backend:
        return Distributed(job, self.group, states)


@dataclass(frozen=True)
class Served:
    """Compute at clients on a network, which hold the records and the ledgers.

    make_backend  returns the backend for this job and this name of the run
    """

    served: ClassVar[bool] = True
    overlaps: ClassVar[bool] = False

    make_backend: Callable[[Job, str], RemoteBackend]
    stop: Stop = never_stop

    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job:
        past = served_prior_spending(config)
        refuse_target(config, past)
        return _with_past(prepare_server(config), past, on_activity)

    def confirm(self, job: Job) -> None:
        """Nothing to confirm with other processes."""

    def bind(self, job: Job, folder: RunFolder) -> Job:
        """Draw cohorts from a secret key of the run, which a restart finds again."""
        streams = Streams(job.config.run.seed, job.streams.secret, folder.cohort_key())
        return replace(job, streams=streams)

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> RemoteBackend:
        return self.make_backend(job, run)


def _with_past(job: Job, past: PriorSpending, on_activity: OnActivity) -> Job:
    job.notes.extend(past.notes)
    return replace(job, past=past, on_activity=on_activity)


IN_PROCESS: Any = InProcess()

"""Executions, which decide where the clients of a run compute.

Clients compute in this process, together with the clients of other runs, by torchrun, or on a
network. An execution builds the job (the prepared objects of a run) and the backend, which computes
the rounds. All other code is equal for every execution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

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
    """Do nothing: the function `stop` of a run that no signal can stop."""


class Execution(ABC):
    """Base class of the ways to execute a run: in this process, by torchrun, or on a network.

    served    True if the clients and their records are on other machines
    overlaps  True if a round may begin before the previous round is checked (`RoundLoop.overlap`)
    stop      called between local steps; may raise an error to end the run
    """

    served: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False
    stop: Stop

    @abstractmethod
    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job:
        """Return the job of a configuration: all objects that the run needs.

        source  replaces the configured data source; None to read the configured one
        """

    def confirm(self, job: Job) -> None:  # noqa: B027
        """Raise DpfedError if other processes of the run have prepared a different job.

        This is called before anything is written. A run in one process does nothing here, because
        it has no other job to compare with.
        """

    def bind(self, job: Job, folder: RunFolder) -> Job:
        """Return the job after adding values that its run folder stores, such as a secret key."""
        return job

    @abstractmethod
    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> Backend:
        """Return the backend, which computes the clients of each round.

        run      name of the run
        states   store of the vectors that clients keep between rounds
        watch    called with the results of clients that compute side by side; None for no watcher
        overlap  True if a round may begin before the previous round is checked
        """


@dataclass(frozen=True)
class InProcess(Execution):
    """Compute all clients of a run in this process.

    cache  records, frozen models and features of earlier runs, for runs with equal settings
    batch  connects this run with other runs that are trained together; None for a run that trains
           alone
    """

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

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> Backend:
        return Fleet(job, states, watch, self.stop, check_messages=not overlap)


@dataclass(frozen=True)
class Torchrun(Execution):
    """Compute the clients on all processes that torchrun started.

    Rank 0 uses this class, and the other ranks call `training.run.assist`.
    """

    group: Group
    stop: Stop = never_stop

    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job:
        return InProcess().prepare(config, source, on_activity)

    def confirm(self, job: Job) -> None:
        agree(job, self.group)

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> Backend:
        return Distributed(job, self.group, states)


@dataclass(frozen=True)
class Served(Execution):
    """Compute the clients on a network. Each client has its own records and its own ledger.

    make_backend  returns the backend for a job and the name of the run
    """

    served: ClassVar[bool] = True

    make_backend: Callable[[Job, str], RemoteBackend]
    stop: Stop = never_stop

    def prepare(self, config: Config, source: Source | None, on_activity: OnActivity) -> Job:
        past = served_prior_spending(config)
        refuse_target(config, past)
        return _with_past(prepare_server(config), past, on_activity)

    def bind(self, job: Job, folder: RunFolder) -> Job:
        """Return the job with random streams that draw cohorts from a secret key of the run.

        The key is stored in the run folder, so that a resumed run draws equal cohorts.
        """
        streams = Streams(job.config.run.seed, job.streams.secret, folder.cohort_key())
        return replace(job, streams=streams)

    def backend(
        self, job: Job, run: str, states: ClientStates, watch: LocalWatch | None, overlap: bool
    ) -> RemoteBackend:
        return self.make_backend(job, run)


def _with_past(job: Job, past: PriorSpending, on_activity: OnActivity) -> Job:
    job.notes.extend(past.notes)
    return replace(job, past=past, on_activity=on_activity)


IN_PROCESS = InProcess()

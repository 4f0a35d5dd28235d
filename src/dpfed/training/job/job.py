"""Build the job of a configuration: all objects that a run needs, checked before training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm
from dpfed.config import Config
from dpfed.data.partition import Shards
from dpfed.data.tables import Source
from dpfed.model.lora import Adapted
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.task import InputSpec
from dpfed.privacy.accounting.guarantee import NO_PRIOR_SPENDING, PriorSpending
from dpfed.privacy.batched_sums import BatchedSum
from dpfed.privacy.noise import Streams
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.record_batch import Augmentations, Records
from dpfed.training.callbacks.activity import OnActivity, ignore
from dpfed.training.job.data import (
    NO_RECORDS,
    augmentations_for,
    load_source,
    server_data,
    shards_for,
    spec_of,
    tables_of,
)
from dpfed.training.job.device import device_of, set_threads
from dpfed.training.job.frozen_features import basis_of
from dpfed.training.job.job_cache import JobCache
from dpfed.training.job.learning_rate import with_number
from dpfed.training.job.model import build_model
from dpfed.training.job.notes import data_notes, data_warnings, federation_note, plan_warnings
from dpfed.training.job.plan import check_algorithm, declared_sizes, plan_for


@dataclass(frozen=True)
class PrivateRecords:
    """The clients' training records; empty on a server.

    Only the oracle, which computes noised gradients, may read them.

    records        records of all clients on the device; if only the head is trained, their features
                   (outputs of the frozen layers)
    shards         indices of the records, and protected units (records or persons) of each client
    augmentations  random augmentation of each drawn record; None without augmentation
    raw_inputs     the original inputs if `records` has features; None otherwise
    """

    records: Records
    shards: Shards
    augmentations: Augmentations | None = None
    raw_inputs: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class PublicData:
    """The part of the data that the server knows.

    test     the server's test records on the device, in the format of the training records
    spec     description of the inputs, such as their kind and shape
    classes  class names, in the order of the label numbers
    """

    test: Records
    spec: InputSpec
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """All prepared objects of one run. Training does not change them.

    model        computes per-record gradients and scores; only the head if the run trains on
                 precomputed features
    adapted      the whole model with its adapter
    theta        initial trainable vector, `[P]`, for P trainable parameters
    plan         privacy mechanism (sampling, clipping and noise) of each client
    schedule     numbers of clients, rounds and local steps, and the size of a cohort
    private      the clients' training records
    public       the test records, and the description of inputs and classes
    streams      the run's random streams
    past         privacy already spent on the weights that the run starts from
    notes        facts for the user to know
    warnings     facts that the user should act on
    served       True on a server, whose clients and records are on other machines
    batched_sum  computes the clipped sums of runs that are trained together; None for a single run
    on_activity  called with the progress of slow operations
    """

    config: Config
    model: PerSample
    adapted: Adapted
    theta: Tensor
    plan: Plan
    schedule: Schedule
    private: PrivateRecords
    public: PublicData
    streams: Streams
    device: torch.device
    past: PriorSpending = NO_PRIOR_SPENDING
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    served: bool = False
    batched_sum: BatchedSum | None = None
    on_activity: OnActivity = ignore

    @property
    def algorithm(self) -> Algorithm:
        algorithm: Algorithm = self.config.algorithm
        return algorithm

    @property
    def space(self) -> Space:
        return self.model.space


def prepare(
    config: Config,
    source: Source | None = None,
    cache: JobCache | None = None,
    on_activity: OnActivity = ignore,
) -> Job:
    """Return the job of a configuration: all objects that a simulated run needs.

    source  replaces the configured data source
    cache   has records, models and features of earlier jobs, which this job reuses if they are
            equal; None to prepare everything again
    """
    with cache.lock if cache else nullcontext():
        return _prepare(config, source, cache, on_activity)


def _prepare(
    config: Config, source: Source | None, shared: JobCache | None, on_activity: OnActivity
) -> Job:
    cache = shared or JobCache()
    device = device_of(config.run.device)
    streams = Streams(config.run.seed, secret=config.run.noise == "os")
    source = load_source(config, source, cache)
    shards = shards_for(config, source, streams)
    plan, schedule = plan_for(config, shards.sizes)
    notes = check_algorithm(config, plan)
    spec = spec_of(source, config.model)
    ready = build_model(config, spec, streams, device, shared)
    config = with_number(config, plan, schedule, ready.model.space)
    steps = config.run.rounds * config.run.local_steps
    draws = steps * schedule.cohort * float(plan.expected.mean())
    tables = tables_of(config, source, device)
    basis = basis_of(config, ready, tables, draws, cache, on_activity)
    if basis.raw_inputs is not None:
        set_threads(config.run.threads, basis.model.space.size)
    notes += [*ready.notes, *basis.notes, *data_notes(config, source, shards)]
    return Job(
        config=config,
        model=basis.model,
        adapted=ready.adapted,
        theta=ready.theta,
        plan=plan,
        schedule=schedule,
        private=PrivateRecords(
            basis.records, shards, augmentations_for(config, source), basis.raw_inputs
        ),
        public=PublicData(basis.test, spec, source.classes),
        streams=streams,
        device=device,
        notes=[*notes, *federation_note(config, plan)],
        warnings=[*data_warnings(config, source, shards), *plan_warnings(config, plan)],
    )


def prepare_server(config: Config) -> Job:
    """Return the job of a server whose clients are on other machines, without private records.

    The section [federation] declares the clients' sizes. Client i of the plan is the i-th client
    name in alphabetical order.
    """
    device = device_of(config.run.device)
    streams = Streams(config.run.seed, secret=config.run.noise == "os")
    plan, schedule = plan_for(config, declared_sizes(config))
    notes = check_algorithm(config, plan)
    spec, classes, test = server_data(config, device)
    ready = build_model(config, spec, streams, device)
    config = with_number(config, plan, schedule, ready.model.space)
    nothing = np.zeros(0, dtype=np.int64)
    no_shards = Shards(np.zeros(plan.clients + 1, np.int64), np.zeros(1, np.int64), nothing)
    return Job(
        config=config,
        model=ready.model,
        adapted=ready.adapted,
        theta=ready.theta,
        plan=plan,
        schedule=schedule,
        private=PrivateRecords(NO_RECORDS, no_shards),
        public=PublicData(test, spec, classes),
        streams=streams,
        device=device,
        notes=[*notes, *ready.notes],
        warnings=plan_warnings(config, plan),
        served=True,
    )

"""Compute from a configuration: the clients' sizes, the privacy plan and the schedule of rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpfed.algorithms.base import Facts
from dpfed.config import Config
from dpfed.data.tables import Published
from dpfed.errors import DpfedError
from dpfed.privacy.noise import Streams
from dpfed.privacy.plan import Plan, Schedule, make_plan
from dpfed.training.job.data import configured_source, shards_for


def plan_for(config: Config, sizes: np.ndarray) -> tuple[Plan, Schedule]:
    """Return the privacy plan (noise and batch of each client) and the schedule of rounds.

    sizes  number of protected units of each client; a unit is one record, or all of one person
    """
    run = config.run
    privacy = config.privacy
    releases = config.algorithm.releases
    if privacy.sigma is not None:
        privacy = replace(privacy, sigma=privacy.sigma * config.algorithm.noise_factor)
    if (run.min_clients or 0) > len(sizes):
        raise DpfedError(
            f"run.min_clients = {run.min_clients} is more than the {len(sizes)} clients there are"
        )
    schedule = replace(
        Schedule.of(len(sizes), run.rounds, run.local_steps, run.participation),
        choice=run.cohort_choice,
        max_rounds=run.max_rounds_per_client,
        max_records=run.max_records_per_step,
    )
    unit = config.data.unit_column
    return make_plan(privacy, sizes, schedule, releases.batches, releases.releases, unit), schedule


def plan_of(config: Config) -> tuple[Plan, Schedule]:
    """Return the privacy plan and the schedule of rounds without building the model.

    The data are read only if published record counts do not determine the clients' sizes.
    """
    sizes = published_sizes(config)
    if sizes is None:
        source = configured_source(config.data, config.model)
        sizes = shards_for(config, source, Streams(config.run.seed)).sizes
    return plan_for(config, sizes)


def published_sizes(config: Config) -> np.ndarray | None:
    """Return the clients' sizes if they follow from a published record count, else None.

    They do if the data set has a published size and all clients get equally many records.
    """
    data = config.data
    published: Published | None = getattr(data, "published", None)
    equal_sizes = data.partition in ("dirichlet_equal", "iid") and not data.unit_column
    if published is None or data.path is not None or not equal_sizes:
        return None
    if data.clients > published.records:
        raise DpfedError(
            f"data.clients = {data.clients} is more than the {published.records} records there are"
        )
    return np.full(data.clients, published.records // data.clients)


def client_names(config: Config) -> list[str]:
    """Return the client names that [federation] declares, in alphabetical order.

    Client i of the privacy plan is the i-th of these names.
    """
    if config.federation is None or not config.federation.clients:
        raise DpfedError(
            "a server needs the public figures of its clients: give [federation.clients], "
            "name = declared records"
        )
    return sorted(config.federation.clients)


def declared_sizes(config: Config) -> np.ndarray:
    """Return each client's number of protected units as [federation] declares it.

    The order is that of `client_names`.
    """
    names = client_names(config)
    assert config.federation is not None
    return np.array([config.federation.clients[name] for name in names], dtype=np.int64)


def check_algorithm(config: Config, plan: Plan) -> list[str]:
    """Raise DpfedError if the algorithm cannot run under this privacy plan.

    Return the algorithm's notes for the user.
    """
    facts = Facts(
        equal_phi=plan.equal_phi,
        private=plan.private,
        allow_nan=config.run.allow_nan,
        calibrated=config.privacy.target_epsilon is not None,
        varying_phi=plan.clipping.counts,
    )
    notes: list[str] = config.algorithm.check(facts)
    return notes

"""Train a job with canaries among its records, and measure all that it releases.

A canary is a unit for which a fair coin decides if it is in the data. Training uses the job's own
algorithm, model, records, plan, isolation and noise. Every audited client takes part in each round.
One training run shows the released gradients, the clients' messages, the drawn batches and the
noise.

The auditor knows all records except the canaries. So it can compute the clipped sum of the other
records of each batch, and subtract this known part from the released sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dpfed.algorithms.base import Context
from dpfed.data.partition import Shards
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle
from dpfed.privacy.plan import Schedule
from dpfed.privacy.sampling import DrawnBatch
from dpfed.training.auditing.canaries import (
    Directions,
    canary_codes,
    directions_for,
    with_canaries,
)
from dpfed.training.auditing.draws import Draws
from dpfed.training.auditing.measurement import Measurement, Step, signs_of
from dpfed.training.auditing.setting import AuditSetting, AuditSize, fair_coins
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job
from dpfed.training.local_steps import LocalResult
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate


class Observations:
    """All values that an audit observes while it trains the job once or several times.

    A client counts as a new client in each training run, with a higher number.

    setting    the audited clients; each is listed once for each training run
    coins      `[runs * clients, canaries]`, True for a canary that is in the data
    gradients  scores and shifts of the canaries, measured in the released gradients
    messages   `[runs * clients, canaries]` score of each canary, from the messages to the server
    draws      drawn batches, and measured values that contain noise only
    """

    def __init__(self, setting: AuditSetting, coins: np.ndarray) -> None:
        self.setting = setting
        self.coins = coins
        self.gradients = Measurement(setting, coins)
        self.messages = np.zeros(coins.shape)
        self.draws = Draws(setting, coins.shape[1])


@dataclass(frozen=True)
class _Release:
    """One released gradient sum of S clients, measured in units of the clip norm C.

    along  `[S, canaries]` component of the released sum along each canary's direction
    known  `[S, canaries]` part of `along` that records other than canaries cause
    noise  `[S, any number]` noise at coordinates at which no canary has a gradient
    """

    along: np.ndarray
    known: np.ndarray
    noise: np.ndarray


class Recorder:
    """Records the drawn batches and released gradients of one training run in `observations`.

    directions  directions of the canaries' gradients
    first       number in `observations` of the first client of this training run
    present     `[clients, units]`, False for a canary that is not in the data
    """

    def __init__(
        self, observations: Observations, directions: Directions, first: int, present: np.ndarray
    ) -> None:
        self.directions = directions
        self._all = observations
        self._first = first
        self._present = present
        rows = slice(first, first + len(present))
        self._signs = signs_of(observations.setting, observations.coins)[rows]
        # The auditor knows which other records were drawn. With batches of a fixed size, this
        # reveals if a canary was drawn. A score that used it would make the bound invalid.
        self._independent = observations.setting.plan.sampling == "poisson"
        self._drawn: list[list[np.ndarray]] = []
        self._releases: list[list[_Release]] = []

    def begin(self, clients: int) -> None:
        """Begin to record a round, also again after an attempt that failed for lack of memory.

        clients  number of clients that are computed together in this attempt
        """
        self._drawn = [[] for _ in range(clients)]
        self._releases = []

    def drawn(self, row: int, client: int, fresh: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Record each drawn batch of a client, and yield it without canaries that are not present.

        row    index of the client among the clients that are computed together
        fresh  the units of each drawn batch
        """
        for units in fresh:
            self._drawn[row].append(units)
            yield units[self._present[client][units]]

    def released(self, sums: Tensor, known: Tensor, again: bool) -> None:
        """Measure one release: gradient sums of S clients, `[S, P]`, in units of the clip norm C.

        sums   the released sums, with noise
        known  the part of the sums that records other than canaries cause, without noise
        again  True if the last batch is released once more, with new noise
        """
        found = _Release(
            self.directions.along(sums),
            self.directions.along(known),
            self.directions.beside(sums) - self.directions.beside(known),
        )
        if again:
            self._releases[-1].append(found)
        else:
            self._releases.append([found])

    def finish(self, ctx: Context, clients: Sequence[int], result: LocalResult) -> None:
        """Store all measurements of these clients when they have finished their round.

        result  the messages of the clients to the server
        """
        own = np.asarray(clients)
        rows = self._first + own
        signs = self._signs[own]
        spread = np.square(signs).sum(1)
        start = (int(ctx.t) - 1) * len(self._releases)
        for k, releases in enumerate(self._releases):
            along, known, noise = (
                np.nan_to_num(np.mean([getattr(r, name) for r in releases], axis=0))
                for name in ("along", "known", "noise")
            )
            summed = ((along - known) * signs).sum(1)
            seen = along - known if self._independent else along
            self._all.gradients.add(Step(rows, seen, 1.0, summed, spread, noise))
            self._all.draws.add(start + k, rows, [drawn[k] for drawn in self._drawn], noise)
        # A training step goes against the gradient, so a canary in the data makes its component of
        # the message negative. The component is NaN if the client diverges.
        delta = self.directions.along(result.message["delta"]) / float(ctx.lr)
        self._all.messages[rows] -= np.nan_to_num(delta)


class AuditedOracle(FleetOracle):
    """An oracle for audits, which shows its batches and sums without noise to a recorder.

    An oracle computes and releases noised gradients. Never use this one on a real client, because
    the recorder sees private values.
    """

    def __init__(self, recorder: Recorder, codes: np.ndarray, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._recorder = recorder
        self._codes = codes
        recorder.begin(len(self._clients))
        self._batches = [
            recorder.drawn(row, client, fresh)
            for row, (client, fresh) in enumerate(zip(self._clients, self._batches, strict=True))
        ]

    def _release(self, theta: Tensor, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        # Call the oracle's own release first. It makes passes (forward and backward computations)
        # so small that the next computation fits into memory.
        mean, phi = super()._release(theta, batch)
        known, _ = self._clipped_sum(theta, without_canaries(batch, self._codes))
        steps = self._grid_steps()
        if steps is not None:
            known = known.double() * steps.unsqueeze(1)
        clip = self._plan.clip
        sums = mean.double() * self._expected / clip
        self._recorder.released(sums, known / clip, again=self._released > 1)
        return mean, phi


def without_canaries(batch: DrawnBatch, codes: np.ndarray) -> DrawnBatch:
    """Return the batch with only those records that are no canaries.

    codes  value of the model input CODE for each record; it is 0 for a record that is no canary
    """
    record = codes[batch.row] == 0
    kept = np.unique(batch.unit[record])
    return DrawnBatch(
        row=batch.row[record],
        client=batch.client[record],
        unit=np.searchsorted(kept, batch.unit[record]),
        owner=batch.owner[kept],
        key=batch.key[record],
        place=batch.place[kept],
    )


def observe(job: Job, clients: np.ndarray, setting: AuditSetting, size: AuditSize) -> Observations:
    """Train the job with canaries `size.runs` times, and return all observations.

    clients  numbers of the audited clients in the job
    setting  setting of an audit of these clients
    """
    everyone = np.arange(len(clients))
    repeated = setting.only(np.tile(everyone, size.runs))
    found = Observations(repeated, fair_coins(repeated, size.canaries, 1))
    shards = shards_of_clients(job.private.shards, clients)
    private = replace(job.private, shards=shards)
    # All clients and runs use the same directions. If two of them have the same noise, the
    # measured values of noise are then equal, and the test of the noise finds it.
    rng = setting.streams.generator("check", 2)
    directions = directions_for(job.space, size.canaries, rng)
    for run in range(size.runs):
        first = run * len(clients)
        positions = [rng.permutation(units)[: size.canaries] for units in setting.plan.sizes]
        signs = signs_of(setting, found.coins[first : first + len(clients)])
        present = np.ones((len(clients), int(setting.plan.sizes.max())), dtype=bool)
        for row, units, sign in zip(present, positions, signs, strict=True):
            row[units] = sign != 0
        codes = canary_codes(shards, np.stack(positions), signs, len(job.private.records.labels))
        streams = Streams(job.streams.number("check", run + 1), secret=job.streams.secret)
        audited = _audited_job(replace(job, private=private, streams=streams), setting)
        recorder = Recorder(found, directions, first, present)
        _train(with_canaries(audited, directions, codes), recorder, codes)
    return found


def _train(job: Job, recorder: Recorder, codes: np.ndarray) -> None:
    fleet = Fleet(job, watch=recorder.finish)
    fleet.new_oracle = partial(AuditedOracle, recorder, codes)
    everyone = list(range(job.plan.clients))
    state = first_state(job)
    for t in range(1, job.config.run.rounds + 1):
        mean, answered = fleet.run_cohort(t, state, everyone)
        state = aggregate(job, t, state, everyone, mean, answered)


def _audited_job(job: Job, setting: AuditSetting) -> Job:
    """Return the job with only the audited clients, all of which take part in every round."""
    clients = setting.plan.clients
    run = replace(job.config.run, rounds=setting.rounds, allow_nan=True)
    return replace(
        job,
        config=replace(job.config, run=run),
        plan=setting.plan,
        schedule=Schedule(clients, clients, setting.rounds, setting.local_steps),
    )


def shards_of_clients(shards: Shards, clients: np.ndarray) -> Shards:
    """Return the record indices of these clients, which get new numbers from 0 on."""
    units = [np.arange(shards.clients[i], shards.clients[i + 1]) for i in clients]
    every = np.concatenate(units)
    return Shards(
        np.cumsum([0, *(len(own) for own in units)]),
        np.concatenate([[0], np.cumsum(np.diff(shards.units)[every])]).astype(np.int64),
        np.concatenate([shards.of(int(client)) for client in clients]),
    )

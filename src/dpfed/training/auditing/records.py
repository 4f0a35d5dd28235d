"""Canaries in the job's own model: records of its own data, whose gradients the auditor knows.

The first units of each client are its canaries; other units count as zero. The auditor computes
each canary's gradient at the initial weights. The oracle computes it again, by the job's own
per-record gradients, so faults in these are found too, such as clipping each token by itself.

A canary is measured along the part of its gradient that is orthogonal to the gradients of the
client's other canaries. Along this direction it shifts the sum by at most C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.data.partition import Shards
from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.training.auditing.measurement import Measurement, Step, signs_of
from dpfed.training.auditing.setting import AuditSetting
from dpfed.training.job.job import Job

# Name of the input that multiplies a record's gradient: 1, 0, or -1 for the opposite canary.
WEIGHT = "canary_weight"
# Most canaries of one client, because the auditor stores the gradient of each.
MOST_PER_CLIENT = 16
# Number of clients that are computed side by side.
FLEET = 32


class WeightedModel:
    """The job's model; the gradient of a record is multiplied by the record's weight."""

    def __init__(self, model: PerSample) -> None:
        self._model = model
        self.space = model.space
        self.has_dropout = False

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        weight = inputs[WEIGHT].unsqueeze(1)
        others = {name: value for name, value in inputs.items() if name != WEIGHT}
        return [g * weight.to(g) for g in self._model.grads(theta, client, others, labels)]


@dataclass(frozen=True)
class Directions:
    """Directions of unit length in which the releases of one client are measured.

    canaries  `[canaries, P]`, each orthogonal to the gradients of the other canaries
    sizes     shift along its direction that each canary may cause, in units of C
    noise     `[canaries, P]`, orthogonal to all canaries and to each other
    """

    canaries: np.ndarray
    sizes: np.ndarray
    noise: np.ndarray


def measured_records(
    job: Job, setting: AuditSetting, clients: np.ndarray, coins: np.ndarray
) -> Measurement:
    """Run the oracle with the job's model and records as canaries; measure all released sums.

    clients  the clients of the job that `setting` has
    """
    signs = signs_of(setting, coins)
    rows = [canary_rows(job, int(client), coins.shape[1]) for client in clients]
    directions = [directions_of(job, own) for own in rows]
    model: Any = WeightedModel(job.model)
    found = Measurement(setting, coins)
    data = weighted_records(job, setting, np.concatenate(rows), signs)
    for numbers, sums in releases(job, setting, PrivateData(model, *data)):
        found.add(_measured(numbers, sums.double().cpu().numpy(), directions, signs))
    return found


def releases(
    job: Job, setting: AuditSetting, data: PrivateData
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Run all steps at the initial weights. Yield the clients and the released sums of each step.

    The sums `[S, P]` are noised and divided by C. Several releases of a batch are averaged.
    """
    plan = setting.plan
    privacy = job.config.privacy
    limits = PassLimits(job.config.run.max_slots, places=job.model.places)
    for first in range(0, plan.clients, FLEET):
        clients = np.arange(first, min(first + FLEET, plan.clients))
        theta = job.theta.expand(len(clients), -1).contiguous()
        unit = torch.from_numpy(plan.expected[clients] / plan.clip).float().to(job.device)
        for t in range(1, setting.rounds + 1):
            terms = RoundTerms(
                plan,
                setting.streams,
                t,
                clients.tolist(),
                setting.local_steps,
                grid=privacy.grid is True,
                isolation=privacy.isolation,
            )
            oracle = FleetOracle(data, terms, limits)
            for _ in range(setting.local_steps * plan.batches):
                sums = [oracle(theta)[0]]
                sums += [oracle.again(theta)[0] for _ in range(plan.releases - 1)]
                yield clients, torch.stack(sums).mean(0) * unit.unsqueeze(1)


def _measured(
    clients: np.ndarray, sums: np.ndarray, directions: list[Directions], signs: np.ndarray
) -> Step:
    chosen = [directions[client] for client in clients]
    pairs = list(zip(clients, chosen, strict=True))
    counted = [signs[client] @ found.canaries for client, found in pairs]
    return Step(
        clients,
        along=np.stack([d.canaries @ row for d, row in zip(chosen, sums, strict=True)]),
        sizes=np.stack([d.sizes for d in chosen]),
        summed=np.array([c @ row for c, row in zip(counted, sums, strict=True)]),
        spread=np.array([c @ c for c in counted]),
        noise=np.stack([d.noise @ row for d, row in zip(chosen, sums, strict=True)]),
    )


def canary_rows(job: Job, client: int, count: int) -> np.ndarray:
    """Return the first record of each of the client's first `count` units."""
    shards = job.private.shards
    first = int(shards.clients[client])
    rows: np.ndarray = shards.records[shards.units[first : first + count]]
    return rows


def weighted_records(
    job: Job, setting: AuditSetting, sources: np.ndarray, signs: np.ndarray
) -> tuple[Records, Shards]:
    """Return the canaries of all clients with their weights; other units are records of weight 0.

    sources  record numbers of the canaries, sorted by client
    signs    `[clients, canaries]`, the weight of each canary
    """
    clients, count = signs.shape
    chosen = torch.from_numpy(np.append(sources, sources[0])).to(job.private.records.labels.device)
    inputs, labels = job.private.records.take(chosen)
    weights = torch.from_numpy(np.append(signs.reshape(-1), 0.0)).float().to(job.device)
    filler = clients * count
    rows = [np.full(int(size), filler) for size in setting.plan.sizes]
    for client, row in enumerate(rows):
        row[:count] = client * count + np.arange(count)
    shards = one_record_units(setting.plan.sizes, np.concatenate(rows))
    return Records({**inputs, WEIGHT: weights}, labels), shards


def one_record_units(sizes: np.ndarray, rows: np.ndarray) -> Shards:
    """Return shards in which each unit has one record.

    sizes  number of units of each client
    rows   record number of each unit: first the units of client 0, then of client 1, and so on
    """
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Shards(starts, np.arange(starts[-1] + 1), rows)


def directions_of(job: Job, rows: np.ndarray) -> Directions:
    """Return the directions for the canaries of one client, which are these records."""
    count = len(rows)
    chosen = torch.from_numpy(rows).to(job.private.records.labels.device)
    inputs, labels = job.private.records.take(chosen)
    owner = torch.zeros(count, dtype=torch.int64, device=labels.device)
    parts = job.model.grads(job.theta.unsqueeze(0), owner, inputs, labels)
    gradients = torch.cat(parts, 1).double().cpu().numpy()
    norms = np.linalg.norm(gradients, axis=1)
    if not np.all(norms > 0):
        raise DpfedError(
            "a record has no gradient at the initial weights, so it cannot be a canary of the "
            "model: audit without --own-model"
        )
    units = gradients / norms[:, None]
    products = units @ units.T
    if gradients.shape[1] < 2 * count or np.linalg.eigvalsh(products)[0] < 1e-6:
        raise DpfedError(
            f"the first {count} records of a client have nearly dependent gradients: "
            "give fewer --canaries"
        )
    inverse = np.linalg.inv(products)
    lengths = np.sqrt(np.diag(inverse))
    rng = np.random.default_rng(int(rows[0]))
    random = rng.standard_normal((gradients.shape[1], count))
    orthogonal, _ = np.linalg.qr(np.concatenate([units.T, random], axis=1))
    reached = np.minimum(1.0, norms / job.plan.clip)
    return Directions(inverse @ units / lengths[:, None], reached / lengths, orthogonal.T[count:])

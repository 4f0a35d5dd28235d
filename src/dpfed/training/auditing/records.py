"""Canaries that are records of the job and keep their own gradients.

A canary is a record for which a fair coin decides if it is in the data. The first units of each
client are its canaries, and all other units get the gradient zero. The auditor computes each
canary's gradient at the initial weights. The oracle, which clips and noises gradients, computes it
again as in training. So the audit also finds faults in this computation, such as clipping each
token by itself.

A canary is measured along the part of its gradient that is orthogonal to the gradients of the
client's other canaries. Along this direction it shifts the sum by at most the clip norm C.
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

# Name of the model input that holds a record's weight: 1, 0 or -1. It multiplies the gradient.
WEIGHT = "canary_weight"
# Most canaries of one client. The auditor stores the gradient of each, which needs memory.
MOST_PER_CLIENT = 16
# Largest number of clients whose gradients are computed together.
FLEET = 32


class WeightedModel:
    """The job's model, with each record's gradient multiplied by a weight of the record.

    The weight is 1 for a canary in the data, 0 for no gradient, and -1 for the opposite gradient.
    """

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
    """Directions of length 1 along which the auditor measures released sums of one client.

    canaries  `[canaries, P]` a direction for each canary among P trainable numbers, orthogonal to
              the gradients of all other canaries
    sizes     `[canaries]` shift that the canary causes along its direction, in units of the clip
              norm C
    noise     `[canaries, P]` directions that measure only noise; they are orthogonal to the
              gradients of all canaries and to each other
    """

    canaries: np.ndarray
    sizes: np.ndarray
    noise: np.ndarray


def measured_records(
    job: Job, setting: AuditSetting, clients: np.ndarray, coins: np.ndarray
) -> Measurement:
    """Release gradients of a job in which some records are canaries, and measure the canaries.

    clients  numbers in the job of the clients in `setting`
    coins    `[clients, canaries]`, True for a canary that is in the data
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
    """Run all steps at the initial weights; yield (numbers of S clients, their released sums).

    The sums `[S, P]` of P trainable numbers have noise and are divided by the clip norm C. If a
    batch is released several times, its sums are averaged.
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
    """Return record indices of a client's canaries: the first record of its first `count` units."""
    shards = job.private.shards
    first = int(shards.clients[client])
    rows: np.ndarray = shards.records[shards.units[first : first + count]]
    return rows


def weighted_records(
    job: Job, setting: AuditSetting, sources: np.ndarray, signs: np.ndarray
) -> tuple[Records, Shards]:
    """Return records with weights, and shards that say which client has which of these records.

    Canaries have the given weights. Each other unit gets a record of weight 0, so that every client
    keeps its number of units.

    sources  record indices of the canaries, sorted by client
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
    """Return shards (the record indices of all clients) in which each unit has one record.

    sizes  number of units of each client
    rows   record index of each unit: first the units of client 0, then of client 1, and so on
    """
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Shards(starts, np.arange(starts[-1] + 1), rows)


def directions_of(job: Job, rows: np.ndarray) -> Directions:
    """Return the directions in which one client's canaries are measured.

    rows  record indices of the client's canaries
    """
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

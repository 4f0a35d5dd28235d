"""Canaries in the job's oracle: a small model whose gradients are the canaries' directions.

A canary is a record that is present or absent by a coin toss. The audit runs the job's own oracle,
with its plan, rates, noise and steps. It replaces only model and data.

The model is a sum of bias-free linear layers, and its loss is its output. So the gradient of a
record is the record itself, repeated in every layer. The gradient of canary j has norm 1e3·B·C and
direction j, spread over all layers. Clipping must reduce its norm to C. Other records are zero.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from dpfed.data.partition import Shards
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import Task
from dpfed.privacy.record_batch import Records
from dpfed.training.auditing.measurement import Measurement, Step, signs_of
from dpfed.training.auditing.setting import AuditSetting

# Number of layers of the canary model. If a bug clips each of 16 layers separately to C, a
# canary has norm 4 C, which the audit detects.
LAYERS = 16


class LinearSum(nn.Module):
    """Model whose output is the sum of LAYERS linear layers without bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def canary_model(width: int, device: torch.device) -> PerSample:
    model = LinearSum(width).to(device)
    space = space_of(trainable(model)).to(device)
    return PerSample(model, space, call, Task(lambda scores, labels: scores[:, 0]))


def canary_data(setting: AuditSetting, coins: np.ndarray) -> tuple[Records, Shards]:
    """Return records and shards in which the first records of each client are its canaries.

    coins  `[clients, canaries]`, True for a present canary

    With add/remove adjacency an absent canary is a zero record. With replace-one adjacency it is
    the canary with the opposite sign.
    """
    plan = setting.plan
    width = coins.shape[1]
    size = 1e3 * float(plan.expected.max()) * plan.clip / sqrt(LAYERS)
    absent_size = 0.0 if plan.mechanism(0).adjacency == "add/remove one" else -size
    directions = torch.eye(width, device=setting.device)
    x = torch.cat([size * directions, absent_size * directions, 0 * directions[:1]])
    rows = []
    for coin, units in zip(coins, plan.sizes, strict=True):
        row = np.full(int(units), 2 * width)
        row[:width] = np.where(coin, np.arange(width), width + np.arange(width))
        rows.append(row)
    records = Records({"x": x}, torch.zeros(len(x), dtype=torch.int64, device=setting.device))
    return records, one_record_units(plan.sizes, np.concatenate(rows))


def one_record_units(sizes: np.ndarray, rows: np.ndarray) -> Shards:
    """Return shards in which each unit has one record.

    sizes  number of units of each client
    rows   record number of each unit: first the units of client 0, then of client 1, and so on
    """
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Shards(starts, np.arange(starts[-1] + 1), rows)


def canary_components(sums: Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inner products of sums `[S, P]` with unit vectors: two arrays `[S, width]`.

    The vectors of the first array are the canaries' directions. The vectors of the second array
    are the same, but with alternating signs of the layers. They are orthogonal to all canaries.
    """
    layers = sums.reshape(len(sums), LAYERS, width).double().cpu().numpy() / sqrt(LAYERS)
    alternating = np.where(np.arange(LAYERS) % 2, -1.0, 1.0)
    return layers.sum(1), np.einsum("slw,l->sw", layers, alternating)


def measured_oracle(setting: AuditSetting, coins: np.ndarray) -> Measurement:
    """Run the oracle with these canaries, and measure all released sums."""
    width = coins.shape[1]
    model = canary_model(width, setting.device)
    signs = signs_of(setting, coins)
    found = Measurement(setting, coins)
    for _, clients, sums in setting.releases(model, *canary_data(setting, coins)):
        along, noise = canary_components(sums, width)
        summed = (along * signs[clients]).sum(1)
        spread = np.square(signs[clients]).sum(1)
        found.add(Step(clients, along, 1.0, summed, spread, noise))
    return found

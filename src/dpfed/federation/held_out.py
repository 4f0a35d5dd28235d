"""Noised counts of right answers on held-out units, for federations without a public test set.

A client never trains on its held-out units. A unit's column or keyed hash alone decides if it is
held out, so that adding or removing one unit moves no other.

A unit whose records are answered right with share r adds r to the right count and 1 - r to the
wrong count. Its Euclidean contribution is at most 1. Both counts get Gaussian noise of standard
deviation sigma, so together they are one Gaussian mechanism of multiplier sigma without sampling
(q = 1). The wrong count costs nothing, and the server needs no number of units.

Each unit is either trained on or held out. The client still charges both to the same ledger. The
total is an upper bound, also if the split changes later.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.data.partition import Shards
from dpfed.data.tables import Table
from dpfed.errors import DpfedError
from dpfed.federation.client_config import ClientConfig
from dpfed.federation.messages import ScoringTerms
from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.grid_noise import COUNT_STEP
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Noise
from dpfed.privacy.oracle import Isolation
from dpfed.privacy.published import show_loss, show_score
from dpfed.privacy.record_batch import Records
from dpfed.training.run_folder.atomic_file import write_file

# The name of these charges in a ledger.
PART = "evaluate"
KEY = "held-out.key"
FLAGS = {"true": True, "1": True, "false": False, "0": False}


def mechanism_of(sigma: float) -> Mechanism:
    """Return the Gaussian mechanism of one request: every unit is counted."""
    return Mechanism("poisson", 1.0, sigma)


def split(config: ClientConfig, table: Table, state: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and the held-out rows; no unit has rows in both."""
    units = table.column(config.data.unit_column)
    client = config.client
    held_out = np.zeros(len(table), dtype=bool)
    if client.held_out_column is not None:
        held_out = _read_flags(table.column(client.held_out_column), client.held_out_column)
        if units is not None:
            _, unit_of_row = np.unique(units, return_inverse=True)
            share = np.bincount(unit_of_row, held_out) / np.bincount(unit_of_row)
            if ((share > 0) & (share < 1)).any():
                raise DpfedError(
                    f"a {config.data.unit_column} has records that are held out "
                    "and others that are not"
                )
    elif client.held_out_share:
        held_out = _draw(table, units, client.held_out_share, _key(state))
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def rows_of(table: Table, rows: np.ndarray) -> Table:
    inputs = {name: values[rows] for name, values in table.inputs.items()}
    columns = {name: values[rows] for name, values in table.columns.items()}
    return Table(inputs, table.labels[rows], columns)


def _read_flags(column: np.ndarray | None, name: str) -> np.ndarray:
    found = [FLAGS.get(str(value).lower()) for value in column] if column is not None else []
    if None in found:
        raise DpfedError(f"client.held_out_column = {name!r} must hold true and false, or 1 and 0")
    return np.array(found, dtype=bool)


def _draw(table: Table, units: np.ndarray | None, share: float, key: bytes) -> np.ndarray:
    """Return True for held-out rows, by a keyed hash of the unit or else of the whole record."""

    def number(row: int) -> int:
        found = hashlib.blake2b(digest_size=8, key=key)
        if units is not None:
            found.update(str(units[row]).encode())
        else:
            found.update(str(int(table.labels[row])).encode())
            for name, values in sorted(table.inputs.items()):
                found.update(name.encode() + _bytes_of(values[row]))
        return int.from_bytes(found.digest(), "little")

    return np.array([number(row) < share * 2.0**64 for row in range(len(table))], dtype=bool)


def _bytes_of(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else np.asarray(value).tobytes()


def _key(state: Path) -> bytes:
    """Return the client's secret key, so that nobody else can compute which units are held out."""
    path = state / KEY
    if not path.exists():
        write_file(path, lambda file: file.write(os.urandom(32)))
    try:
        return path.read_bytes()
    except OSError as error:
        raise DpfedError(f"{path} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True)
class HeldOut:
    """A client's held-out records and the units that they belong to; there may be none."""

    records: Records
    shards: Shards


def noised_counts(
    model: PerSample,
    theta: Tensor,
    held_out: HeldOut,
    sigma: float,
    noise: Noise,
    isolation: Isolation = "exact",
) -> Tensor:
    """Return noised counts of right and wrong answers `[2]`, in whole steps of one grid.

    With `isolation` exact each record is a pass of its own, so that no unit changes the answers
    of others.
    """
    records, shards = held_out.records, held_out.shards
    size = 1 if isolation == "exact" else model.rows
    # The empty part is for clients without held-out records: their counts are noise alone.
    shares = [torch.zeros(0, dtype=torch.float64)]
    for first in range(0, len(records.labels), size):
        rows = torch.arange(first, min(first + size, len(records.labels)), device=theta.device)
        inputs, labels = records.take(rows)
        correct = model.correct(model.scores(theta, inputs), labels)
        shares.append(correct.double().nan_to_num().clamp(0, 1).cpu())
    right = torch.cat(shares).numpy()[shards.records]
    records_per_unit = np.diff(shards.units)
    unit_of_record = np.repeat(np.arange(len(shards.units) - 1), records_per_unit)
    means = np.bincount(unit_of_record, right) / records_per_unit
    # Each unit is rounded by itself; the rest of its 1 counts as wrong.
    steps = np.rint(means / COUNT_STEP).astype(np.int64)
    total = torch.tensor([steps.sum(), (round(1 / COUNT_STEP) - steps).sum()])
    added = (noise.normal64(2) * (sigma / COUNT_STEP)).round().to(torch.int64)
    return (total + added.cpu()).double() * COUNT_STEP


@dataclass(frozen=True)
class Score:
    """The accuracy on held-out units of the clients that replied.

    noise    standard deviation of the accuracy
    units    number of units by the noised counts
    epsilon  privacy loss of one held-out unit by all such counts of this run so far
    """

    round: int
    accuracy: float
    noise: float
    units: float
    clients: int
    epsilon: float

    def __str__(self) -> str:
        return (
            f"round {self.round}: accuracy {show_score(self.accuracy)} on about "
            f"{self.units:.0f} held-out units of {self.clients} clients, "
            f"noise ±{show_score(self.noise)} (one standard deviation); "
            f"epsilon {show_loss(self.epsilon)} for each of them"
        )


def score_of(
    t: int, counts: Mapping[str, tuple[float, float]], sigma: float, requests: int, delta: float
) -> Score | None:
    """Return the score of (right, wrong) counts by client, or None if their sum is not positive.

    `requests` is the number of requests for counts that a client got in this run.
    """
    right, wrong = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    units = right + wrong
    if not units > 0:
        return None
    accuracy = right / units
    # First order: ((1 - a) noise of the right count - a noise of the wrong count) / units.
    noise = math.sqrt(len(counts) * ((1 - accuracy) ** 2 + accuracy**2)) * sigma / units
    spent = epsilon([(mechanism_of(sigma), requests)], delta).value
    return Score(t, accuracy, noise, units, len(counts), spent)


def bounds(terms: ScoringTerms) -> tuple[float, float]:
    """Return the range of honest counts; a client declares at least half of its held-out units."""
    return -20 * terms.sigma, 2 * terms.held_out + 20 * terms.sigma

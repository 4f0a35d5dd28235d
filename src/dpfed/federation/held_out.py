"""Noised counts of right answers on held-out units, for federations without a public test set.

A unit is one record, or all records of one person. A client never trains on its held-out units. A
column of the data or a keyed hash of the unit decides if the unit is held out. Adding or removing
one unit therefore never changes this decision for another unit.

If a share r of a unit's records is answered correctly, the unit adds r to the right count and 1 - r
to the wrong count. The Euclidean norm of this contribution is at most 1. Both counts get Gaussian
noise of standard deviation sigma. Together the counts are one Gaussian mechanism of noise
multiplier sigma that uses every unit (q = 1). The wrong count thus costs no additional privacy. The
sum of both counts gives the server the noised number of units.

Each unit is either trained on or held out, but the client records the privacy loss of training and
of counts in one ledger. The ledger's total is therefore an upper bound for every unit, even if the
split into training and held-out units changes later.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
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
from dpfed.privacy.isolation.turns import order_at_places
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Noise
from dpfed.privacy.published import show_loss, show_score
from dpfed.privacy.record_batch import Records
from dpfed.training.run_folder.atomic_file import write_file

# Value of the field `part` in a client's ledger. It marks the privacy loss of noised counts, in
# contrast to training.
PART = "evaluate"
KEY = "held-out.key"
FLAGS = {"true": True, "1": True, "false": False, "0": False}


def mechanism_of(sigma: float) -> Mechanism:
    """Return the mechanism of one request for counts: Gaussian noise on counts of all units."""
    return Mechanism("poisson", 1.0, sigma)


def split(config: ClientConfig, table: Table, state: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows to train on, and the indices of the held-out rows.

    All rows of one unit are in the same array.
    """
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
    """Return a mask of the held-out rows, about the fraction `share` of all rows.

    A hash with the secret `key` decides if a row is held out. The hashed value is the row's unit,
    or the whole record if the table has no units.
    """

    def number(row: int) -> int:
        found = hashlib.blake2b(digest_size=8, key=key)
        if units is not None:
            found.update(str(units[row]).encode())
        else:
            found.update(_bytes_of(_label_key(table.labels[row])))
            for name, values in sorted(table.inputs.items()):
                found.update(name.encode() + _bytes_of(values[row]))
        return int.from_bytes(found.digest(), "little")

    return np.array([number(row) < share * 2.0**64 for row in range(len(table))], dtype=bool)


def _label_key(label: np.ndarray) -> str | np.ndarray:
    """Return the value to hash for a label: a class number as text, any other label unchanged.

    Earlier versions hashed class numbers as text. A change of the hashed value would change the
    choice of held-out records.
    """
    return str(int(label)) if label.dtype.kind == "i" else label


def _bytes_of(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else np.asarray(value).tobytes()


def _key(state: Path) -> bytes:
    """Return the client's secret key for the choice of held-out units; create it if missing.

    Nobody without the key can compute which units are held out.
    """
    path = state / KEY
    if not path.exists():
        write_file(path, lambda file: file.write(os.urandom(32)))
    try:
        return path.read_bytes()
    except OSError as error:
        raise DpfedError(f"{path} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True)
class HeldOut:
    """A client's held-out records and the units that they belong to. Both may be empty."""

    records: Records
    shards: Shards


def noised_counts(
    model: PerSample,
    theta: Tensor,
    held_out: HeldOut,
    sigma: float,
    noise: Noise,
    draws: np.random.Generator | None,
) -> Tensor:
    """Return the noised counts of right and wrong answers on the held-out units, `[2]`.

    Both counts are multiples of `COUNT_STEP`.

    sigma  standard deviation of the noise on each count
    draws  random generator that assigns the records to positions in batches of a fixed shape, so
           that no unit influences the answers for other units (privacy/isolation/turns.py); None to
           fill the batches in the order of the records
    """
    records, shards = held_out.records, held_out.shards
    assert model.task.correct is not None
    count = len(records.labels)
    if draws is None:
        rows = np.arange(count)
        passes = [rows[first : first + model.rows] for first in range(0, count, model.rows)]
    else:
        place = draws.integers(model.places, size=count)
        passes = list(order_at_places(place, model.places))
    shares = np.zeros(count)
    for record in passes:
        used = record >= 0
        # An empty position in the batch repeats another record, and its answer is not used.
        filled = np.where(used, record, record.max())
        inputs, labels = records.take(torch.from_numpy(filled).to(theta.device))
        correct = model.task.correct(model.scores(theta, inputs), labels)
        shares[record[used]] = correct.double().nan_to_num().clamp(0, 1).cpu().numpy()[used]
    right = shares[shards.records]
    records_per_unit = np.diff(shards.units)
    unit_of_record = np.repeat(np.arange(len(shards.units) - 1), records_per_unit)
    means = np.bincount(unit_of_record, right) / records_per_unit
    # A unit with a share r of right answers adds r to the right count and 1 - r to the wrong count,
    # after r is rounded. The rounding of one unit never depends on another unit.
    steps = np.rint(means / COUNT_STEP).astype(np.int64)
    total = torch.tensor([steps.sum(), (round(1 / COUNT_STEP) - steps).sum()])
    added = (noise.normal64(2) * (sigma / COUNT_STEP)).round().to(torch.int64)
    return (total + added.cpu()).double() * COUNT_STEP


@dataclass(frozen=True)
class Score:
    """The noised accuracy on the held-out units of the clients that replied.

    noise    standard deviation of the noise in `accuracy`
    units    noised number of held-out units
    clients  number of clients that replied
    epsilon  epsilon of a held-out unit, for all requests for counts in this run so far
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
    t: int, counts: Sequence[tuple[float, float]], sigma: float, requests: int, delta: float
) -> Score | None:
    """Return the score of all clients together; None if the counts add up to 0 or less.

    counts    the noised numbers (right, wrong) of each client
    sigma     standard deviation of the noise on each count
    requests  number of requests for counts that each client got in this run so far
    """
    right, wrong = (sum(pair[i] for pair in counts) for i in (0, 1))
    units = right + wrong
    if not units > 0:
        return None
    accuracy = right / units
    # To first order the noise changes the accuracy a by ((1 - a) * n_right - a * n_wrong) / units,
    # where n_right and n_wrong are the noise on the two counts.
    noise = math.sqrt(len(counts) * ((1 - accuracy) ** 2 + accuracy**2)) * sigma / units
    spent = epsilon([(mechanism_of(sigma), requests)], delta)
    return Score(t, accuracy, noise, units, len(counts), spent)


def bounds(terms: ScoringTerms) -> tuple[float, float]:
    """Return the smallest and the largest count that the server accepts from a client.

    The bounds assume that an honest client declares at least half of its held-out units. Noise
    above 20 sigma is so improbable that it does not occur.
    """
    return -20 * terms.sigma, 2 * terms.held_out + 20 * terms.sigma

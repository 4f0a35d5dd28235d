"""How a federation without a public test set follows its progress: noised counts of right answers on held-out units.

A client sets units aside that are never trained on. Whether a unit is one of them depends on that unit alone (its column,
or a keyed hash of it), so adding or removing a unit moves no other one. A unit adds the share r of its records that are
answered rightly to one count and 1 − r to another, √(r² + (1−r)²) <= 1 in all; both counts get Gaussian noise of standard
deviation σ. Together they are one Gaussian mechanism of multiplier σ without sampling (q = 1), so the count of wrong
answers costs nothing, and the server need not know how many units there are to divide by it. Training and held-out units are disjoint, so for one unit only one of
the two is a cost; the client charges both to the same ledger and the same epsilon all the same, which is an upper bound,
and stays one if the split is ever drawn anew.
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
from dpfed.federation.messages import ScoringTerms
from dpfed.federation.policy import ClientConfig
from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.grid_noise import COUNT_STEP
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Noise
from dpfed.privacy.oracle import Isolation
from dpfed.privacy.published import show_loss, show_score
from dpfed.privacy.record_batch import Records
from dpfed.training.run_folder.atomic_file import write_file

PART = "evaluate"  # of a round, in the ledger
KEY = "held-out.key"


def mechanism_of(sigma: float) -> Mechanism:
    """A plain Gaussian: every unit is in the count."""
    return Mechanism("poisson", 1.0, sigma)


def split(config: ClientConfig, table: Table, state: Path) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out, of whole units."""
    units = table.column(config.data.unit_column)
    if config.client.held_out_column is not None:
        marked = _marked(table.column(config.client.held_out_column), config.client.held_out_column)
        if units is not None:
            _, which = np.unique(units, return_inverse=True)
            share = np.bincount(which, marked) / np.bincount(which)
            if ((share > 0) & (share < 1)).any():
                raise DpfedError(
                    f"a {config.data.unit_column} has records that are held out and others that are not"
                )
    elif config.client.held_out_share:
        marked = _drawn(table, units, config.client.held_out_share, _key(state))
    else:
        marked = np.zeros(len(table), dtype=bool)
    return np.flatnonzero(~marked), np.flatnonzero(marked)


def rows_of(table: Table, rows: np.ndarray) -> Table:
    inputs = {name: x[rows] for name, x in table.inputs.items()}
    return Table(
        inputs, table.labels[rows], {name: column[rows] for name, column in table.columns.items()}
    )


def _marked(column: np.ndarray | None, name: str) -> np.ndarray:
    known = {"true": True, "1": True, "false": False, "0": False}
    found = [known.get(str(value).lower()) for value in column] if column is not None else []
    if None in found:
        raise DpfedError(f"client.held_out_column = {name!r} must hold true and false, or 1 and 0")
    return np.array(found, dtype=bool)


def _drawn(table: Table, units: np.ndarray | None, share: float, key: bytes) -> np.ndarray:
    """By a keyed hash of the unit's name, or of the whole record where a record is the unit."""

    def number(row: int) -> int:
        found = hashlib.blake2b(digest_size=8, key=key)
        if units is not None:
            found.update(str(units[row]).encode())
        else:
            found.update(str(int(table.labels[row])).encode())
            for name, x in sorted(table.inputs.items()):
                value = x[row]
                found.update(
                    name.encode()
                    + (value.encode() if isinstance(value, str) else np.asarray(value).tobytes())
                )
        return int.from_bytes(found.digest(), "little")

    return np.array([number(row) < share * 2.0**64 for row in range(len(table))], dtype=bool)


def _key(state: Path) -> bytes:
    """The client's own, so that nobody else can say which of the units they know of are held out."""
    path = state / KEY
    if not path.exists():
        write_file(path, lambda file: file.write(os.urandom(32)))
    try:
        return path.read_bytes()
    except OSError as error:
        raise DpfedError(f"{path} cannot be read: {error.strerror or error}") from None


def noised_counts(
    model: PerSample,
    theta: Tensor,
    records: Records,
    shards: Shards,
    sigma: float,
    noise: Noise,
    isolation: Isolation = "exact",
) -> Tensor:
    """Right and wrong answers `[2]`, each unit counting as one in all, with noise; all in whole steps of one grid.

    isolation  exact: each record is a pass of its own, so a unit cannot change the answers of others
    """
    together = 1 if isolation == "exact" else model.rows
    # The empty part is for clients that hold nothing out: their counts are noise alone.
    shares = [torch.zeros(0, dtype=torch.float64)]
    for first in range(0, len(records.labels), together):
        rows = torch.arange(first, min(first + together, len(records.labels)), device=theta.device)
        inputs, labels = records.take(rows)
        shares.append(
            model.correct(model.scores(theta, inputs), labels)
            .double()
            .nan_to_num()
            .clamp(0, 1)
            .cpu()
        )
    right = torch.cat(shares).numpy()[shards.records]
    of = np.repeat(np.arange(len(shards.units) - 1), np.diff(shards.units))
    means = np.bincount(of, right) / np.diff(shards.units)
    steps = np.rint(means / COUNT_STEP).astype(
        np.int64
    )  # rounded unit by unit, and what it has left is wrong
    total = torch.tensor([steps.sum(), (round(1 / COUNT_STEP) - steps).sum()])
    added = (noise.normal64(2) * (sigma / COUNT_STEP)).round().to(torch.int64)
    return (total + added.cpu()).double() * COUNT_STEP


@dataclass(frozen=True)
class Score:
    """What a server knows after asking: accuracy on the held-out units of those who answered, and how noisy it is.

    units    how many there are by their noised counts
    epsilon  of one held-out unit, for all such counts of this run so far
    """

    round: int
    accuracy: float
    noise: float
    units: float
    clients: int
    epsilon: float

    def __str__(self) -> str:
        return (
            f"round {self.round}: accuracy {show_score(self.accuracy)} on about {self.units:.0f} held-out units of "
            f"{self.clients} clients, noise ±{show_score(self.noise)} (one standard deviation); "
            f"epsilon {show_loss(self.epsilon)} for each of them"
        )


def score_of(
    t: int, counts: Mapping[str, tuple[float, float]], sigma: float, asked: int, delta: float
) -> Score | None:
    """From the sums of right and wrong over those who answered; None where the noise has left nothing to divide by.

    asked: how often a client was asked for counts in this run.
    """
    right, wrong = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    units = right + wrong
    if not units > 0:
        return None
    accuracy = right / units
    # To first order: (1−a) times the noise of the rights less a times that of the wrongs, over the number of units.
    noise = math.sqrt(len(counts) * ((1 - accuracy) ** 2 + accuracy**2)) * sigma / units
    return Score(
        t, accuracy, noise, units, len(counts), epsilon([(mechanism_of(sigma), asked)], delta).value
    )


def bounds(terms: ScoringTerms) -> tuple[float, float]:
    """No honest count lies outside: the declared number may be rounded down to the half of it, and no further."""
    return -20 * terms.sigma, 2 * terms.held_out + 20 * terms.sigma


def as_json(scores: list[Score]) -> list[dict[str, Any]]:
    return [{name: getattr(score, name) for name in score.__dataclass_fields__} for score in scores]

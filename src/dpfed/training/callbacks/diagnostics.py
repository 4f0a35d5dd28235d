"""Diagnostics of simulated clients (`run.diagnostics = true`), one line per round in a file.

    spread of v   variance over clients of Adam's second moment v, mean over coordinates
    shift of √v   histograms of Adam's moments |m| and √v̂; noise alone gives √v = σC/B, for noise
                  multiplier σ, clip norm C and batch size B
    drift         root mean square distance of the clients' parameters from their mean after a round

Diagnostics read the states of the clients without protection, so they exist for simulations only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Context
from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.privacy.ledger.private_files import open_private
from dpfed.training.callbacks.base import Callback
from dpfed.training.job.job import Job
from dpfed.training.local_steps import LocalResult
from dpfed.training.rounds import Round
from dpfed.training.run_folder.files import read_rows

FILE = "diagnostics.jsonl"
BINS = 120
# Range of log10(√v) and log10(|m|) in the histograms, for the moments v and m of Adam. The
# histograms cover values from 1e-9 to 10.
DECADES = (-9.0, 1.0)
# Number of rounds with histograms. These rounds are evenly spread over the run.
POINTS = 5


def refuse_real_noise(config: Config) -> None:
    """Raise DpfedError if a run with secret noise asks for diagnostics, which are not private.

    Secret noise (`run.noise = "os"`) protects real records. Seeded noise is only for simulations.
    """
    if config.run.diagnostics and config.run.noise == "os":
        raise DpfedError(
            "run.diagnostics reads the clients' states and cannot be released: "
            'not with run.noise = "os"'
        )


class Diagnostics(Callback):
    """Callback that writes one line of diagnostics after each round.

    During the round it adds up statistics of the clients' states.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        refuse_real_noise(job.config)
        self._path = folder / FILE
        rounds = job.config.run.rounds
        self._shown = {1 + round(i * (rounds - 1) / max(1, POINTS - 1)) for i in range(POINTS)}
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._sums: dict[str, Tensor] = {}
        self._bins: dict[str, Tensor] = {}
        self._phi = 0.0

    def watch(self, ctx: Context, clients: Sequence[int], result: LocalResult) -> None:
        """Add these clients' states after their local steps to the statistics of the round."""
        local = result.states
        self._count += len(clients)
        self._phi += float(ctx.phi.double().sum())
        found = {
            "m": getattr(local, "m", None),
            "v": getattr(local, "v_hat", getattr(local, "v", None)),
        }
        moments = {name: value.detach() for name, value in found.items() if value is not None}
        for name, value in {"theta": local.theta.detach(), **moments}.items():
            value = value.double()
            self._add(name, value.sum(0))
            self._add(f"{name}²", value.square().sum(0))
        if int(ctx.t) in self._shown:
            for name, value in moments.items():
                size = value.clamp_min(0).sqrt() if name == "v" else value.abs()
                # Count values outside the range in the first and the last bin.
                logs = size.double().log10().clamp(*DECADES).flatten().float().cpu()
                bins = torch.histc(logs, BINS, *DECADES)
                self._bins[name] = self._bins[name] + bins if name in self._bins else bins

    def on_round(self, round: Round) -> None:
        """Write the line of diagnostics of the round, unless no client took part.

        A resumed run may write a second line for a round; readers use the last line.
        """
        if self._count == 0:
            return
        row: dict[str, Any] = {
            "round": round.t,
            "release": "not private: simulated clients only",
            "clients": self._count,
        }
        row["drift"] = math.sqrt(float(self._variance("theta").sum()))
        row["noise_std"] = math.sqrt(self._phi / self._count)
        if "v" in self._sums:
            mean = self._sums["v"] / self._count
            row["v_variance"] = float(self._variance("v").mean())
            row["v_mean"] = float(mean.mean())
            row["v_relative_variance"] = float(
                self._variance("v").mean() / mean.square().mean().clamp_min(1e-300)
            )
        for name, counts in self._bins.items():
            row[f"{'sqrt_v' if name == 'v' else 'abs_m'}_histogram"] = counts.long().tolist()
            row["histogram_log10"] = [*DECADES]
        # JSON has neither NaN nor infinity, so replace both by null.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        with open_private(self._path, "a") as file:
            file.write(json.dumps(finite) + "\n")
        self._clear()

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _variance(self, name: str) -> Tensor:
        """Return the variance over clients of each of the P coordinates of a vector, `[P]`."""
        mean = self._sums[name] / self._count
        return (self._sums[f"{name}²"] / self._count - mean.square()).clamp_min(0)


def read_diagnostics(folder: Path) -> list[dict[str, Any]]:
    """Read a run's diagnostics; return one dict per round, in the order of rounds."""
    return read_rows(folder / FILE)

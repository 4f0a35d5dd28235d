"""The folder of a run: configuration, metrics, ledger, trained vector, result. A run never overwrites another."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save

from dpfed.config import Config, to_toml
from dpfed.engine.durable import write_file
from dpfed.engine.rounds import Round
from dpfed.errors import DpfedError
from dpfed.model.space import Space
from dpfed.privacy.ledger import Ledger

CONFIG, METRICS, LEDGER, MODEL, RESULT, CHECKPOINTS = (
    "config.toml",
    "metrics.jsonl",
    "ledger.sqlite",
    "model.safetensors",
    "run.json",
    "checkpoint",
)
PACKAGES = ("dpfed", "torch", "transformers", "peft", "dp-accounting", "numpy")


class RunFolder:
    """Made once at the start of a run; everything a run leaves behind is written through it."""

    def __init__(self, path: Path, config: Config, note: str, force: bool = False, resume: bool = False) -> None:
        self.path, self._note = path, note
        if resume:
            self._metrics = _reopened(path / METRICS)
            return
        refuse_occupied(path, force)
        try:
            if (path / CONFIG).exists():
                shutil.rmtree(path)
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(f"# {note}\n{to_toml(config)}", encoding="utf-8")
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise DpfedError(f"the run folder {path} cannot be written: {error.strerror or error}") from None

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def log(self, round: Round) -> None:
        """One line per round, on disk when the round is over."""
        row: dict[str, Any] = {
            "round": round.t,
            "accuracy": round.accuracy,
            "loss": round.loss if round.loss is None or math.isfinite(round.loss) else None,
            "epsilon_server_max": round.epsilon,
            "clip": round.clip if math.isfinite(round.clip) else None,
            "cohort": round.cohort,
            "eligible": round.eligible,
            "seconds": round.seconds,
        }
        if round.t == 0:
            row["release"] = self._note
        with _plainly(self.path / METRICS):
            self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
            self._metrics.flush()

    def rewind(self, t: int) -> None:
        """Forgets the lines of rounds after t, which will be run again."""
        self._metrics.close()
        path = self.path / METRICS
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _round_of(line) <= t]
        write_file(path, lambda file: file.write("".join(f"{line}\n" for line in kept).encode()))
        self._metrics = _reopened(path)

    def last_round(self) -> float:
        """The last round in the metrics, -1 if there is none."""
        lines = (self.path / METRICS).read_text(encoding="utf-8").splitlines()
        return max((t for t in map(_round_of, lines) if t < math.inf), default=-1)

    def rounds(self, t: int, theta: torch.Tensor) -> list[Round]:
        """Rounds 0 and t, the first and the last in the metrics, with the vector that the last one left."""
        rows = [json.loads(line) for line in (self.path / METRICS).read_text(encoding="utf-8").splitlines()]
        if not rows or (rows[0]["round"], rows[-1]["round"]) != (0, t):
            raise DpfedError(
                f"{self.path / METRICS} does not hold rounds 0 to {t}: put back the file that the run wrote"
            )
        return [
            Round(
                t=row["round"],
                accuracy=row["accuracy"],
                loss=row["loss"],
                epsilon=row["epsilon_server_max"],
                cohort=row["cohort"],
                eligible=row["eligible"],
                clip=math.inf if row["clip"] is None else row["clip"],
                seconds=row["seconds"],
                theta=theta,
            )
            for row in (rows[0], rows[-1])
        ]

    def sync(self) -> None:
        """Metrics on the disk, before a checkpoint says that their rounds are over."""
        with _plainly(self.path / METRICS):
            os.fsync(self._metrics.fileno())

    def save_model(self, theta: torch.Tensor, space: Space, release: str) -> None:
        tensors = {name: t.contiguous().cpu() for name, t in space.unflatten(theta.detach().clone()).items()}
        blob = save(tensors, metadata={"release": release})
        write_file(self.path / MODEL, lambda file: file.write(blob))

    def begin(self, run: str, note: str) -> None:
        """Names the run before anything is released, so that a ledger of another run is noticed."""
        self.save_result({"run": run, "state": "running", "release": note})

    def save_result(self, result: dict[str, Any]) -> None:
        full = {**result, "versions": versions(), "python": platform.python_version(), "written": time.time()}
        text = json.dumps(full, indent=2, allow_nan=False) + "\n"
        write_file(self.path / RESULT, lambda file: file.write(text.encode()))

    def close(self) -> None:
        self._metrics.close()


def _reopened(path: Path) -> IO[str]:
    with _plainly(path):
        return path.open("a", encoding="utf-8")


@contextmanager
def _plainly(path: Path) -> Iterator[None]:
    """A full disk is one sentence, not a traceback."""
    try:
        yield
    except OSError as error:
        raise DpfedError(f"{path} cannot be written: {error.strerror or error}") from None


def _round_of(line: str) -> float:
    """The round of a line of metrics; a line cut short by a crash is of no round and is dropped."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def refuse_occupied(path: Path, force: bool) -> None:
    """Called before anything is computed as well, so that nobody waits for a refusal."""
    if (path / CONFIG).exists():
        if not force:
            raise DpfedError(f"{path} already holds a run: choose another --out, or --force to replace it")
        if spent_for_good(path):
            raise DpfedError(f"{path} holds the ledger of a run with real noise, which is kept: choose another --out")
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DpfedError(f"{path} is not empty and not a run: choose another --out")


def spent_for_good(path: Path) -> bool:
    """Whether the folder's ledger records releases that cannot be repeated; it must not be forgotten."""
    if not (path / LEDGER).exists():
        return False
    with Ledger.open(path / LEDGER, readonly=True) as ledger:
        return any(row.charge.noise == "os" for row in ledger.rows())


def versions() -> dict[str, str]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def fresh_folder(config: Config) -> Path:
    """runs/<time>-<data>-<algorithm>, with a number where that exists."""
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{config.data.name}-{config.algorithm.name}"
    path, count = Path("runs") / stem, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{stem}-{count}"
    return path

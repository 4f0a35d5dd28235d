"""Write the folder of a run: configuration, metrics, trained model and result."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save

import dpfed
from dpfed.config import Config, to_toml
from dpfed.errors import DpfedError, phrase
from dpfed.model.parameter_vector import Space
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.ledger.private_files import (
    lock_file,
    make_private_folder,
    open_private,
    restrict_tree,
)
from dpfed.training.rounds import Round
from dpfed.training.run_folder.atomic_file import short_errors, write_file
from dpfed.training.run_folder.files import (
    CHECKPOINTS,
    COHORTS,
    CONFIG,
    LEDGER,
    METRICS,
    MODEL,
    RESULT,
    read_rows,
)
from dpfed.training.server_state import State

LOCK = ".lock"
# Files that are in the folder of a run that was killed before it wrote its configuration.
UNFINISHED = {LOCK, f".{CONFIG}.part"}
PACKAGES = ("dpfed", "torch", "transformers", "peft", "dp-accounting", "numpy")


class RunFolder:
    """The folder of one training run, locked so that no other process can write to it.

    note    sentence for the files that says if the results may be released
    force   True: replace an earlier run in the folder
    resume  True: continue the run in the folder
    """

    def __init__(
        self, path: Path, config: Config, note: str, force: bool = False, resume: bool = False
    ) -> None:
        self.path = path
        self.ledger = path / LEDGER
        self.checkpoints = path / CHECKPOINTS
        self._note = note
        self._lock = _locked(path)
        try:
            if resume:
                with short_errors(path, "restricted to its owner"):
                    restrict_tree(path)
            else:
                refuse_occupied(path, force)
                _clear(path)
                self._write(CONFIG, f"# {note}\n{to_toml(config)}")
            self._metrics = _reopened(path / METRICS)
        except BaseException:
            self._lock.close()
            raise

    def _write(self, name: str, text: str) -> None:
        write_file(self.path / name, lambda file: file.write(text.encode()))

    def cohort_key(self) -> bytes:
        """Return the secret 32-byte key from which a server draws the clients of each round.

        The first call creates and stores the key, so that a resumed run uses this key again.
        """
        path = self.path / COHORTS
        with short_errors(path):
            if not path.exists():
                write_file(path, lambda file: file.write(os.urandom(32)))
            return path.read_bytes()

    def log(self, round: Round) -> None:
        """Append the results of a round to metrics.jsonl."""
        row: dict[str, Any] = {
            "round": round.t,
            "accuracy": round.accuracy,
            "loss": _finite(round.loss),
            "epsilon_server_max": round.epsilon,
            "clip": _finite(round.clip),
            "cohort": round.cohort,
            "eligible": round.eligible,
            "seconds": round.seconds,
        }
        if round.last_accuracy is not None:
            row["last_accuracy"] = round.last_accuracy
        if round.r2 is not None:
            row["r2"] = round.r2
        if round.score is not None:
            row["score"] = _finite(round.score)
        if round.t == 0:
            row["release"] = self._note
        with short_errors(self.path / METRICS):
            self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
            self._metrics.flush()

    def amend(self, config: Config, changed: Sequence[tuple[str, Any, Any]], t: int) -> None:
        """Replace the configuration in the folder of a resumed run; add a comment per changed key.

        changed  (key, old value, new value) of each changed key
        t        the last round that used the old values
        """
        if not changed:
            return
        lines = (self.path / CONFIG).read_text(encoding="utf-8").splitlines()
        comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
        comments += [f"# after round {t}: {key} was {a!r}, is {b!r}" for key, a, b in changed]
        self._write(CONFIG, "\n".join([*comments, to_toml(config)]))

    def rewind(self, t: int) -> None:
        """Remove the metrics of rounds after round t, which a resumed run computes again."""
        self._metrics.close()
        rows = [row for row in read_rows(self.path / METRICS) if int(row["round"]) <= t]
        self._write(METRICS, "".join(f"{json.dumps(row)}\n" for row in rows))
        self._metrics = _reopened(self.path / METRICS)

    def last_round(self) -> int:
        """Return the number of the last round in metrics.jsonl; -1 if there is none."""
        return max((int(row["round"]) for row in read_rows(self.path / METRICS)), default=-1)

    def rounds(self, t: int, state: State) -> list[Round]:
        """Return round 0 and round t from metrics.jsonl.

        Raise DpfedError unless the file contains exactly the rounds 0 to t.

        state  server's state after round t, whose vectors are not in metrics.jsonl
        """
        rows = read_rows(self.path / METRICS)
        try:
            if [row["round"] for row in rows] != list(range(t + 1)):
                raise KeyError
            return [_round(row, state) for row in (rows[0], rows[-1])]
        except (KeyError, TypeError):
            raise DpfedError(
                f"{self.path / METRICS} does not hold rounds 0 to {t}: put back the file that the "
                "run wrote"
            ) from None

    def sync(self) -> None:
        """Wait until the metrics are on disk; call this before a checkpoint of their rounds."""
        with short_errors(self.path / METRICS):
            os.fsync(self._metrics.fileno())

    def save_model(self, theta: torch.Tensor, space: Space, release: str) -> None:
        """Write the trained parameters as named tensors to a safetensors file.

        theta    `[P]` vector of all trainable numbers
        release  sentence for the metadata that says if the model may be released
        """
        vector = theta.detach().clone()
        tensors = {name: t.contiguous().cpu() for name, t in space.unflatten(vector).items()}
        blob = save(tensors, metadata={"release": release})
        write_file(self.path / MODEL, lambda file: file.write(blob))

    def begin(self, run: str, note: str) -> None:
        """Write the run's name to run.json before anything is released.

        A resumed run compares this name with the name in the privacy ledger, to refuse the ledger
        of another run.
        """
        self.save_result({"run": run, "state": "running", "release": note})

    def save_result(self, result: dict[str, Any]) -> None:
        """Write run.json: the result, and the versions of Python and of the packages."""
        full = {
            **result,
            "versions": versions(),
            "python": platform.python_version(),
            "written": time.time(),
        }
        self._write(RESULT, json.dumps(full, indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        # Ignore errors here. On a full disk closing fails too, and its error would hide the first
        # error.
        with suppress(OSError):
            self._metrics.close()
        self._lock.close()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _locked(path: Path) -> IO[bytes]:
    """Lock a folder for this process and return the lock file; closing this file ends the lock.

    Raise DpfedError if another process has locked the folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(path)
        return lock_file(path / LOCK)
    except BlockingIOError:
        raise DpfedError(
            f"another run is at work in {path}: wait for it, stop it or {phrase('another out')}"
        ) from None
    except OSError as error:
        raise DpfedError(
            f"the run folder {path} cannot be written: {error.strerror or error}"
        ) from None


def _clear(path: Path) -> None:
    """Delete all files of the old run in a folder, except the lock file.

    The configuration is deleted last. If deleting is interrupted, the folder still counts as the
    folder of a run, and a new run may replace it.
    """
    with short_errors(path, "replaced"):
        for part in sorted(path.iterdir(), key=lambda p: p.name == CONFIG):
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            elif part.name != LOCK:
                part.unlink()


def _round(row: Mapping[str, Any], state: State) -> Round:
    return Round(
        t=row["round"],
        accuracy=row["accuracy"],
        loss=row["loss"],
        epsilon=row["epsilon_server_max"],
        cohort=row["cohort"],
        eligible=row["eligible"],
        clip=math.inf if row["clip"] is None else row["clip"],
        seconds=row["seconds"],
        theta=state.result,
        last_accuracy=row.get("last_accuracy"),
        score=row.get("score"),
        r2=row.get("r2"),
        best=state.best,
    )


def _reopened(path: Path) -> IO[str]:
    with short_errors(path):
        return open_private(path, "a")


def refuse_occupied(path: Path, force: bool) -> None:
    """Raise DpfedError if the folder for a new run contains a run or other files.

    With `force` it may contain a run that the new run replaces. A run that has released values with
    secret noise (`run.noise = "os"`) is never replaced, because its ledger must be kept.
    """
    if (path / CONFIG).exists():
        if not force:
            raise DpfedError(
                f"{path} already holds a run: {phrase('another out')}{phrase('replace')}"
            )
        if _has_real_releases(path):
            raise DpfedError(
                f"{path} holds the ledger of a run with real noise, which is kept: "
                f"{phrase('another out')}"
            )
    elif path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - UNFINISHED):
        raise DpfedError(f"{path} is not empty and not a run: {phrase('another out')}")


def _has_real_releases(path: Path) -> bool:
    """Return True if the privacy ledger in the folder records releases with secret noise.

    Secret noise (`run.noise = "os"`) protects real records. Such a ledger must be kept, because the
    privacy remains spent.
    """
    if not (path / LEDGER).exists():
        return False
    with Ledger.open(path / LEDGER, readonly=True) as ledger:
        return any(row.charge.noise == "os" for row in ledger.rows())


def versions() -> dict[str, str]:
    """Return the versions of dpfed and of the packages that affect its results."""
    return {name: dpfed.__version__ if name == "dpfed" else _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def fresh_folder(config: Config) -> Path:
    """Return an unused path runs/<time>-<data>-<algorithm>, with a number added if needed."""
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{config.data.name}-{config.algorithm.name}"
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())

"""The folder of a run: configuration, metrics, ledger, trained vector, result. A run never overwrites another."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from dpfed.privacy.private_files import make_private_folder, open_private, restrict_tree
from dpfed.training.rounds import Round
from dpfed.training.run_folder.atomic_file import write_file

CONFIG, METRICS, LEDGER, MODEL, RESULT, CHECKPOINTS = (
    "config.toml",
    "metrics.jsonl",
    "ledger.sqlite",
    "model.safetensors",
    "run.json",
    "checkpoint",
)
LOCK = ".lock"
COHORTS = "cohorts.key"
UNFINISHED = {
    LOCK,
    f".{CONFIG}.part",
}  # all that is left of a run killed before it had a configuration
PACKAGES = ("dpfed", "torch", "transformers", "peft", "dp-accounting", "numpy")


class RunFolder:
    """Made once at the start of a run; everything a run leaves behind is written through it."""

    def __init__(
        self, path: Path, config: Config, note: str, force: bool = False, resume: bool = False
    ) -> None:
        self.path, self._note = path, note
        self._lock = _locked(path)
        try:
            if not resume:
                refuse_occupied(path, force)
                _clear(path)
                text = f"# {note}\n{to_toml(config)}".encode()
                write_file(path / CONFIG, lambda file: file.write(text))
            else:
                with _plainly(path, "restricted to its owner"):
                    restrict_tree(path)
            self._metrics = _reopened(path / METRICS)
        except BaseException:
            self._lock.close()
            raise

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def cohort_key(self) -> bytes:
        """What a server draws its cohorts from: secret, and the same when it starts again."""
        path = self.path / COHORTS
        with _plainly(path):
            if not path.exists():
                write_file(path, lambda file: file.write(os.urandom(32)))
            return path.read_bytes()

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
        if round.last_accuracy is not None:
            row["last_accuracy"] = round.last_accuracy
        if round.t == 0:
            row["release"] = self._note
        with _plainly(self.path / METRICS):
            self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
            self._metrics.flush()

    def amend(self, config: Config, changed: Sequence[tuple[str, Any, Any]], t: int) -> None:
        """The configuration as it is from round t on, with a line for each key that has changed."""
        if not changed:
            return
        lines = (self.path / CONFIG).read_text(encoding="utf-8").splitlines()
        said = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
        said += [f"# after round {t}: {key} was {old!r}, is {new!r}" for key, old, new in changed]
        text = "\n".join([*said, to_toml(config)]).encode()
        write_file(self.path / CONFIG, lambda file: file.write(text))

    def _lines(self) -> list[str]:
        with _plainly(self.path / METRICS, "read"):
            # Damaged bytes must not end in a traceback: their line is then no JSON, and of no round.
            return (self.path / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()

    def rewind(self, t: int) -> None:
        """Forgets the lines of rounds after t, which will be run again."""
        self._metrics.close()
        path = self.path / METRICS
        kept = [line for line in self._lines() if _round_of(line) <= t]
        write_file(path, lambda file: file.write("".join(f"{line}\n" for line in kept).encode()))
        self._metrics = _reopened(path)

    def last_round(self) -> float:
        """The last round in the metrics, -1 if there is none."""
        return max((t for t in map(_round_of, self._lines()) if t < math.inf), default=-1)

    def rounds(self, t: int, theta: torch.Tensor) -> list[Round]:
        """Rounds 0 and t, the first and the last in the metrics, with the vector that the last one left."""
        lost = DpfedError(
            f"{self.path / METRICS} does not hold rounds 0 to {t}: put back the file that the run wrote"
        )
        rows = [json.loads(line) for line in self._lines()]
        if [row["round"] for row in rows] != list(range(t + 1)):
            raise lost
        try:
            return [_round(row, theta) for row in (rows[0], rows[-1])]
        except (KeyError, TypeError):
            raise lost from None

    def sync(self) -> None:
        """Metrics on the disk, before a checkpoint says that their rounds are over."""
        with _plainly(self.path / METRICS):
            os.fsync(self._metrics.fileno())

    def save_model(self, theta: torch.Tensor, space: Space, release: str) -> None:
        tensors = {
            name: t.contiguous().cpu()
            for name, t in space.unflatten(theta.detach().clone()).items()
        }
        blob = save(tensors, metadata={"release": release})
        write_file(self.path / MODEL, lambda file: file.write(blob))

    def begin(self, run: str, note: str) -> None:
        """Names the run before anything is released, so that a ledger of another run is noticed."""
        self.save_result({"run": run, "state": "running", "release": note})

    def save_result(self, result: dict[str, Any]) -> None:
        full = {
            **result,
            "versions": versions(),
            "python": platform.python_version(),
            "written": time.time(),
        }
        text = json.dumps(full, indent=2, allow_nan=False) + "\n"
        write_file(self.path / RESULT, lambda file: file.write(text.encode()))

    def close(self) -> None:
        with suppress(
            OSError
        ):  # on a full disk closing fails once more, and would hide why the run ended
            self._metrics.close()
        self._lock.close()


def _locked(path: Path) -> IO[bytes]:
    """The right to work in a folder, for one process; the lock ends with it, however that ends."""
    lock: IO[bytes] | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(path)
        lock = open_private(path / LOCK, "ab")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except OSError as error:
        if lock is not None:
            lock.close()
        if isinstance(error, BlockingIOError):
            raise DpfedError(
                f"another run is at work in {path}: wait for it, stop it or {phrase('another out')}"
            ) from None
        raise DpfedError(
            f"the run folder {path} cannot be written: {error.strerror or error}"
        ) from None


def _clear(path: Path) -> None:
    """Removes a run that is to be replaced, its configuration last: until then it is a run that may be replaced."""
    with _plainly(path, "replaced"):
        for part in sorted(path.iterdir(), key=lambda p: p.name == CONFIG):
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            elif part.name != LOCK:
                part.unlink()


def _round(row: Mapping[str, Any], theta: torch.Tensor) -> Round:
    """A line of metrics as what it was made of."""
    return Round(
        t=row["round"],
        accuracy=row["accuracy"],
        loss=row["loss"],
        epsilon=row["epsilon_server_max"],
        cohort=row["cohort"],
        eligible=row["eligible"],
        clip=math.inf if row["clip"] is None else row["clip"],
        seconds=row["seconds"],
        theta=theta,
        last_accuracy=row.get("last_accuracy"),
    )


def _reopened(path: Path) -> IO[str]:
    with _plainly(path):
        return open_private(path, "a")


@contextmanager
def _plainly(path: Path, done: str = "written") -> Iterator[None]:
    """A full disk is one sentence, not a traceback."""
    try:
        yield
    except OSError as error:
        raise DpfedError(f"{path} cannot be {done}: {error.strerror or error}") from None


def _round_of(line: str) -> float:
    """The round of a line of metrics; a line cut short by a crash is of no round and is dropped."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def refuse_occupied(path: Path, force: bool) -> None:
    """Called before anything is computed as well, so that nobody waits for a refusal."""
    if (path / CONFIG).exists():
        if not force:
            raise DpfedError(
                f"{path} already holds a run: {phrase('another out')}{phrase('replace')}"
            )
        if spent_for_good(path):
            raise DpfedError(
                f"{path} holds the ledger of a run with real noise, which is kept: {phrase('another out')}"
            )
    elif path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - UNFINISHED):
        raise DpfedError(f"{path} is not empty and not a run: {phrase('another out')}")


def spent_for_good(path: Path) -> bool:
    """Whether the folder's ledger records releases that cannot be repeated; it must not be forgotten."""
    if not (path / LEDGER).exists():
        return False
    with Ledger.open(path / LEDGER, readonly=True) as ledger:
        return any(row.charge.noise == "os" for row in ledger.rows())


def versions() -> dict[str, str]:
    """Our own is that of the code at work, wherever it was installed from."""
    return {name: dpfed.__version__ if name == "dpfed" else _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # known to Python, not to pip
        return "unknown"


def fresh_folder(config: Config) -> Path:
    """runs/<time>-<data>-<algorithm>, with a number where that exists."""
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{config.data.name}-{config.algorithm.name}"
    path, count = Path("runs") / stem, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{stem}-{count}"
    return path

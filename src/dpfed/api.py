"""The Python interface: from a model and a data set to an adapter that was trained under differential privacy.

import dpfed

tuned = dpfed.fine_tune("my-model-folder", train, test, clients=20, epsilon=4.0)
print(tuned.accuracy, tuned.epsilon)
tuned.export("my-adapter")
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfed.cli.progress import Watch
from dpfed.config import Config, build, overlay
from dpfed.data.sources.given import source_of
from dpfed.data.tables import Source
from dpfed.engine.folder import CONFIG, fresh_folder, refuse_occupied
from dpfed.engine.prior import SPENDING, hub_spending, read_stored, spending_file
from dpfed.engine.run import run
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.report.card import write_export

MODELS = {"image": "auto-image", "text": "auto-text", "features": "linear"}


@dataclass(frozen=True)
class Tuned:
    """A finished run: its folder, and the result as `dpfed run --json` prints it."""

    out: Path
    result: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        """On the test set, 0..1."""
        return float(self.result["test_accuracy"])

    @property
    def epsilon(self) -> Mapping[str, float | None]:
        """server_worst, server_max and third_party; None without privacy."""
        figures: Mapping[str, float | None] = self.result["epsilon"]
        return figures

    def export(self, folder: str | Path, merge: bool = False) -> Path:
        """Writes a peft adapter with its model card (or, merged, a whole model) to a new folder."""
        write_export(self.out, Path(folder), merge)
        return Path(folder)


def fine_tune(
    model: Any,
    train: Any,
    test: Any,
    *,
    clients: int = 10,
    epsilon: float | None = 8.0,
    delta: float = 1e-5,
    classes: Sequence[str] | None = None,
    tokenizer: Any = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Tuned:
    """Fine-tunes a model across simulated clients, and returns the run.

    model     a folder or hub name of a Hugging Face model, the model itself, or one of `dpfed list models`
    train     private records: a dictionary of columns, a data frame or a Hugging Face dataset with a column `label` and
              one of `text` (and `text_pair`), `image` or `features`; dealt to `clients`, or to those that
              settings={"data.partition": "natural", "data.client_column": ...} names
    test      the server's public records, with the same columns
    epsilon   server's view of a client in every round; None: settings give privacy.sigma, or no privacy
    settings  any other keys of the configuration, such as {"algorithm.lr": 1e-3, "run.rounds": 50}
    progress  shows rounds with accuracy and epsilon, and the work inside a round, on stderr
    """
    source = source_of(train, test, classes)
    folder = Path(out) if out is not None else None
    raw = _defaults(source.kind, clients, epsilon, delta)
    for key, value in (settings or {}).items():
        tree: Any = value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        raw = overlay(raw, tree)
    config = _configured(raw, model, source.kind)
    folder = folder or fresh_folder(config)
    if isinstance(model, str | Path):
        return _trained(config, folder, source, progress)
    refuse_occupied(folder, force=False)  # before anything is written beside it
    base = _saved(model, tokenizer, folder, config)
    config = _configured(overlay(raw, {"model": {"weights": str(base)}}), str(base), source.kind)
    try:
        return _trained(config, folder, source, progress)
    finally:
        if not (folder / CONFIG).exists():  # refused before it began: nothing is left behind
            shutil.rmtree(base)


def _trained(config: Config, folder: Path, source: Source, progress: bool) -> Tuned:
    if not progress:
        return Tuned(folder, run(config, folder, source=source))
    with Watch(config.run.rounds) as watch:
        result = run(config, folder, source=source, observe=watch.round, on_activity=watch.activity)
    return Tuned(folder, result)


def _defaults(kind: str, clients: int, epsilon: float | None, delta: float) -> dict[str, Any]:
    privacy: dict[str, Any] = {"delta": delta, "batch": 16}
    privacy |= {} if epsilon is None else {"target_epsilon": epsilon}
    return {
        "data": {"name": "given", "clients": clients},
        "privacy": privacy,
        "algorithm": {"name": "dp-fedadamw", "lr": 1e-3},
        "run": {"rounds": 50, "local_steps": 10, "participation": 1.0 if clients <= 20 else 0.1},
    }


def _configured(raw: Mapping[str, Any], model: Any, kind: str) -> Config:
    """The configuration with the model's name: a registered one, or any model for this kind of data."""
    known = registry()
    table: dict[str, Any] = {"name": MODELS[kind]}
    if isinstance(model, str) and model in known.model:
        table = {"name": model}
    elif isinstance(model, str | Path):
        table["weights"] = str(model)
    else:
        table["weights"] = "given"
    return build(overlay({"model": table}, raw), known)


def _saved(model: Any, tokenizer: Any, folder: Path, config: Config) -> Path:
    """A model that lives in memory is written beside the run, so that the run can be repeated and exported."""
    if not hasattr(model, "save_pretrained"):
        raise DpfedError(f"model must be a name, a folder or a Hugging Face model, not {type(model).__name__}")
    if hasattr(config.model, "tokenizer") and config.model.tokenizer is None and tokenizer is None:
        raise DpfedError("a language model in memory needs its tokenizer: fine_tune(model, ..., tokenizer=tokenizer)")
    base = folder.with_name(folder.name + "-base")
    if base.exists():
        raise DpfedError(f"{base} exists: choose another out")
    spent = _account(model)
    if spent is not None:
        read_stored(spent)  # a damaged one is refused before anything is written
    model.save_pretrained(str(base))
    if spent is not None:
        shutil.copy(spent, base / SPENDING)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(base))
    return base


def _account(model: Any) -> Path | None:
    """A model that was loaded from an export keeps its record of what was spent."""
    origin = str(getattr(model, "name_or_path", None) or "")
    if not origin:
        return None
    folder = Path(origin).expanduser()
    path = spending_file(folder)
    if os.path.lexists(path):
        return path
    return None if folder.exists() else hub_spending(origin)

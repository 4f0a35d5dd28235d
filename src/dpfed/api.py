"""The Python interface: from a model and a data set to an adapter that was trained under differential privacy.

import dpfed

tuned = dpfed.fine_tune("my-model-folder", train, test, clients=20, epsilon=4.0)
print(tuned.accuracy, tuned.epsilon)
tuned.export("my-adapter")
"""

from __future__ import annotations

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
from dpfed.engine.prior import record_of, write_record
from dpfed.engine.run import run
from dpfed.errors import DpfedError
from dpfed.model.zoo.text import is_pooled
from dpfed.registry import registry
from dpfed.report.card import write_export

LR = 1e-3
# Noise dominates the second moments, so that Adam's steps are several times shorter than the
# learning rate. At 1e-3 a head that starts at zero stays too small within 500 steps.
NOISED_HEAD_LR = 1e-2
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
              (of a sentence encoder the head alone is trained, unless settings give model.train)
    train     private records: a dictionary of columns, a data frame or a Hugging Face dataset with a column `label` and
              one of `text` (and `text_pair`), `image` or `features`; dealt to `clients`, or to those that
              settings={"data.partition": "natural", "data.client_column": ...} names
    test      the server's public records, with the same columns
    epsilon   server's view of a client in every round; None: settings give privacy.sigma, or no privacy
    settings  any other keys of the configuration, such as {"algorithm.lr": 1e-3, "run.rounds": 50}
    progress  shows rounds with accuracy and epsilon as they pass, on stderr
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
        return Tuned(folder, run(config, folder, source=source, observe=watch.round))


def _defaults(kind: str, clients: int, epsilon: float | None, delta: float) -> dict[str, Any]:
    privacy: dict[str, Any] = {"delta": delta, "batch": 16}
    privacy |= {} if epsilon is None else {"target_epsilon": epsilon}
    return {
        "data": {"name": "given", "clients": clients},
        "privacy": privacy,
        "run": {"rounds": 50, "local_steps": 10, "participation": 1.0 if clients <= 20 else 0.1},
    }


def _configured(raw: Mapping[str, Any], model: Any, kind: str) -> Config:
    """Return the checked configuration: `raw` over the defaults for this model and kind of data.

    The head alone is trained on a sentence encoder, because its vectors are made to be compared.
    """
    known = registry()
    table: dict[str, Any] = {"name": MODELS[kind]}
    if isinstance(model, str) and model in known.model:
        table = {"name": model}
    elif isinstance(model, str | Path):
        table["weights"] = str(model)
    else:
        table["weights"] = "given"
    algorithm: dict[str, Any] = {"name": "dp-fedadamw", "lr": LR}
    under = {"model": table, "algorithm": algorithm}
    config = build(overlay(under, raw), known)
    if isinstance(model, str | Path) and config.model.adapter is None and is_pooled(config.model):
        table["train"] = "head"
        config = build(overlay(under, raw), known)
    head_alone = config.model.train == "head" or config.model.name == "linear"
    if head_alone and config.privacy.enabled:
        algorithm["lr"] = NOISED_HEAD_LR
    return build(overlay(under, raw), known)


def _saved(model: Any, tokenizer: Any, folder: Path, config: Config) -> Path:
    """A model that lives in memory is written beside the run, so that the run can be repeated and exported."""
    if not hasattr(model, "save_pretrained"):
        raise DpfedError(f"model must be a name, a folder or a Hugging Face model, not {type(model).__name__}")
    if hasattr(config.model, "tokenizer") and config.model.tokenizer is None and tokenizer is None:
        raise DpfedError("a language model in memory needs its tokenizer: fine_tune(model, ..., tokenizer=tokenizer)")
    base = folder.with_name(folder.name + "-base")
    if base.exists():
        raise DpfedError(f"{base} exists: choose another out")
    # Read first: a damaged record is refused before anything is written.
    record = _account(model)
    model.save_pretrained(str(base))
    if record is not None:
        write_record(base, record)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(base))
    return base


def _account(model: Any) -> str | None:
    """Return the spending record of what a model was loaded from; None if there is none."""
    origin = str(getattr(model, "name_or_path", None) or "")
    stored = record_of(origin) if origin else None
    return stored.text if stored else None

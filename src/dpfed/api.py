"""The Python interface: from a model and a data set to an adapter that was trained under differential privacy.

import dpfed

tuned = dpfed.fine_tune("my-model-folder", train, test, clients=20, epsilon=4.0)
print(tuned.accuracy, tuned.epsilon)
tuned.export("my-adapter")
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np

from dpfed.config import Config, build, overlay
from dpfed.config.parsing import layer_of
from dpfed.data.sources.given import source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError, DpfedWarning, python_phrases
from dpfed.model.zoo.pretrained import HubSilentError
from dpfed.model.zoo.text import is_pooled
from dpfed.registry import registry
from dpfed.report.model_card import write_export
from dpfed.training.budget.prior_spending import record_of, write_record
from dpfed.training.callbacks.base import OnStart
from dpfed.training.callbacks.progress import ProgressDisplay
from dpfed.training.job.job import Job
from dpfed.training.job.notes import result_warnings
from dpfed.training.run import run
from dpfed.training.run_folder.files import CONFIG
from dpfed.training.run_folder.folder import fresh_folder, refuse_occupied

CLIENTS = 10
EPSILON = 8.0
DELTA = 1e-5
LR = 1e-3
# Noise dominates the second moments, so that Adam's steps are several times shorter than the
# learning rate. At 1e-3 a head that starts at zero stays too small within 500 steps.
NOISED_HEAD_LR = 1e-2
# Keys of [data] that describe files; the records come from `train` and `test`.
NOT_FOR_SETTINGS = {
    "data.name": "the records are those of train and test",
    "data.path": "the records are those of train and test",
    "data.classes": "pass classes to fine_tune",
}
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

    @property
    def notes(self) -> Sequence[str]:
        """What there is to know about the run: how data were read, who the clients are, ..."""
        return tuple(self.result["notes"])

    @property
    def warnings(self) -> Sequence[str]:
        """What to change, or to know before the result is used; also issued as DpfedWarning."""
        return tuple(self.result["warnings"])

    def export(self, folder: str | Path, merge: bool = False) -> Path:
        """Writes a peft adapter with its model card (or, merged, a whole model) to a new folder."""
        write_export(self.out, Path(folder), merge)
        return Path(folder)


def fine_tune(
    model: Any,
    train: Any,
    test: Any,
    *,
    clients: int | None = None,
    epsilon: float | Literal["auto"] | None = "auto",
    delta: float | None = None,
    classes: Sequence[str] | int | None = None,
    tokenizer: Any = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Tuned:
    """Fine-tunes a model across simulated clients, and returns the run.

    model     a folder or hub name of a Hugging Face model, the model itself, or one of `dpfed list models`
              (of a sentence encoder the head alone is trained, unless settings give model.train)
    train     private records: a dictionary of columns, a data frame or a Hugging Face dataset with a
              column `label` (names or numbers) and one of `text` (and `text_pair`), `image` or
              `features`; dealt to `clients`, or to the clients that a column names:
              settings={"data.partition": "natural", "data.client_column": ...}
    test      the server's public records, with the same columns
    clients   number of simulated clients; default 10
    epsilon   server's view of a client in every round; "auto": 8.0, unless settings give privacy.sigma;
              None: settings give privacy.sigma, or privacy.enabled = False
    delta     default 1e-5
    classes   names of the classes in the order of their numbers, or how many there are;
              default: read off the labels
    tokenizer of a language model in memory
    settings  any other keys of the configuration, such as {"algorithm.lr": 1e-3, "run.rounds": 50};
              a setting that contradicts a keyword is refused
    out       folder of the run; default: a new one under runs/
    progress  shows the run, its notes, rounds with accuracy and epsilon, and the work inside a round, on stderr

    Warnings are issued as `dpfed.DpfedWarning`, mistakes raise `dpfed.DpfedError`.
    """
    keywords = {"data.clients": ("clients", clients), "privacy.delta": ("delta", delta)}
    if epsilon != "auto":
        keywords["privacy.target_epsilon"] = ("epsilon", epsilon)
    with python_phrases():
        if tokenizer is not None and isinstance(model, str | Path):
            raise DpfedError(
                f"tokenizer is for a model in memory, and model = {str(model)!r} has its own: "
                "leave it out, or give model.tokenizer in settings"
            )
        given = _given(keywords, settings)
        source = source_of(train, test, classes)
        raw = overlay(_defaults(given, epsilon), given)
        config = _configured(raw, given, model, source.kind)
        _refuse_number_of_clients(config, given, source)
        folder = Path(out) if out is not None else fresh_folder(config)
        if isinstance(model, str | Path):
            return _trained(config, folder, source, progress)
        return _trained_in_memory(model, tokenizer, config, folder, source, progress)


def _trained_in_memory(
    model: Any, tokenizer: Any, config: Config, folder: Path, source: Source, progress: bool
) -> Tuned:
    """Return the run of a model that is first written beside the run's folder."""
    refuse_occupied(folder, force=False)  # before anything is written beside it
    base = _saved(model, tokenizer, folder, config)
    config = replace(config, model=replace(config.model, weights=str(base)))
    try:
        return _trained(config, folder, source, progress)
    finally:
        if not (folder / CONFIG).exists():  # refused before it began: nothing is left behind
            shutil.rmtree(base)


def _given(
    keywords: Mapping[str, tuple[str, Any]], settings: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the tables of all that the caller said; refuse keywords and settings that differ."""
    pairs = _pairs(settings)
    tables = layer_of(pairs)
    for key, why in NOT_FOR_SETTINGS.items():
        if _setting(tables, key) is not None:
            raise DpfedError(f"settings[{key!r}] has no effect: {why}")
    said = [(key, name, value) for key, (name, value) in keywords.items() if value is not None]
    for key, name, value in said:
        other = _setting(tables, key)
        if other is not None and other != value:
            raise DpfedError(
                f"{name} = {value!r} and settings[{key!r}] = {other!r} differ: give one of them"
            )
        if name == "epsilon" and _setting(tables, "privacy.enabled") is False:
            raise DpfedError(
                f"epsilon = {value!r} and settings['privacy.enabled'] = False exclude each other: "
                "pass epsilon=None to train without privacy"
            )
    return layer_of([*pairs, *((key, _plain(value)) for key, _, value in said)])


def _setting(tables: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key such as "data.clients", None if it is not set."""
    section, _, leaf = key.partition(".")
    table = tables.get(section)
    return table.get(leaf) if isinstance(table, Mapping) else None


def _pairs(settings: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the caller's settings as dotted keys with plain values."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        raise DpfedError(
            'settings must be a dictionary of keys and values, such as {"run.rounds": 50}, '
            f"not {type(settings).__name__}"
        )
    for key in settings:
        if not isinstance(key, str) or not all(key.split(".")):
            raise DpfedError(f'settings has the key {key!r}: a key is a text such as "run.rounds"')
    return [(key, _plain(value)) for key, value in settings.items()]


def _plain(value: Any) -> Any:
    """Return a value as TOML has it: paths as texts, numbers of NumPy as those of Python."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _trained(config: Config, folder: Path, source: Source, progress: bool) -> Tuned:
    if progress:
        with ProgressDisplay(config.run.rounds, show_warnings=False) as display:
            result = run(config, folder, source=source, callbacks=[display, OnStart(_warn_of)])
    else:
        result = run(config, folder, source=source, callbacks=[OnStart(_warn_of)])
    for sentence in result_warnings(result):
        _warn(sentence)
    return Tuned(folder, result)


def _warn_of(job: Job) -> None:
    for sentence in job.warnings:
        _warn(sentence)


def _warn(sentence: str) -> None:
    """Issue a warning at the line outside this package that called it."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dpfed."):
        level += 1
        frame = frame.f_back
    warnings.warn(sentence, DpfedWarning, stacklevel=level)


def _defaults(given: Mapping[str, Any], epsilon: float | str | None) -> dict[str, Any]:
    """Return what holds unless the caller says otherwise."""
    clients = _setting(given, "data.clients") or CLIENTS
    few = isinstance(clients, int) and clients <= 20
    target = {"target_epsilon": EPSILON} if epsilon == "auto" else {}
    return {
        "data": {"name": "given", "clients": CLIENTS},
        "privacy": {"delta": DELTA, "batch": 16, **target},
        "run": {"rounds": 50, "local_steps": 10, "participation": 1.0 if few else 0.1},
    }


def _configured(raw: Mapping[str, Any], given: Mapping[str, Any], model: Any, kind: str) -> Config:
    """Return the checked configuration: `raw` over the defaults for this model and kind of data.

    The head alone is trained on a sentence encoder, because its vectors are made to be compared.
    """
    known = registry()
    table: dict[str, Any] = {"name": _setting(given, "model.name") or MODELS[kind]}
    if isinstance(model, str) and model in known.model:
        table = {"name": model}
    elif isinstance(model, str | Path):
        table["weights"] = str(model)
    else:
        table["weights"] = "given"
    for key, value in table.items():
        other = _setting(given, f"model.{key}")
        if other not in (None, value):
            shown = repr(str(model)) if isinstance(model, str | Path) else type(model).__name__
            raise DpfedError(
                f"settings['model.{key}'] = {other!r} is not model = {shown}: give one of them"
            )
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


def _refuse_number_of_clients(config: Config, given: Mapping[str, Any], source: Source) -> None:
    """Refuse a number of clients that is not the number of names in the client column."""
    data = config.data
    if data.partition != "natural" or data.client_column is None:
        return
    if _setting(given, "data.clients") is None:
        return
    owners = source.train.column(data.client_column)
    found = 0 if owners is None else len(set(owners.tolist()))
    if found != data.clients:
        raise DpfedError(
            f"clients = {data.clients}, but the column {data.client_column!r} names {found}: "
            "leave clients out with a natural partition"
        )


def _saved(model: Any, tokenizer: Any, folder: Path, config: Config) -> Path:
    """A model that lives in memory is written beside the run, so that the run can be repeated and exported."""
    if not hasattr(model, "save_pretrained"):
        raise DpfedError(
            f"model must be a name, a folder or a Hugging Face model, not {type(model).__name__}"
        )
    if hasattr(config.model, "tokenizer") and config.model.tokenizer is None and tokenizer is None:
        raise DpfedError(
            "a language model in memory needs its tokenizer: fine_tune(model, ..., tokenizer=tokenizer)"
        )
    base = folder.with_name(folder.name + "-base")
    if base.exists():
        raise DpfedError(f"{base} exists: choose another out")
    # Read first: a damaged record is refused before anything is written.
    record = _account(model)
    if record is not None:
        # Before the weights, so that they are never without their record.
        write_record(base, record)
    model.save_pretrained(str(base))
    if record is not None:
        write_record(base, record)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(base))
    return base


def _account(model: Any) -> str | None:
    """Return the spending record of what a model was loaded from; None if none is known."""
    origin = str(getattr(model, "name_or_path", None) or "")
    try:
        stored = record_of(origin) if origin else None
    except HubSilentError:
        # The model is saved without a record, so every epsilon says that its start is not counted.
        return None
    return stored.text if stored else None

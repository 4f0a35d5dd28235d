"""The Python interface: fine-tune a model on a data set and export the adapter.

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
from dpfed.data.sources.in_memory import source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError, DpfedWarning, python_phrases
from dpfed.model.zoo.hub import HubSilentError
from dpfed.model.zoo.text import is_pooled
from dpfed.registry import registry
from dpfed.report.model_card import write_export
from dpfed.training.budget.prior_spending import record_of, write_record
from dpfed.training.callbacks.base import OnStart
from dpfed.training.callbacks.progress import ProgressDisplay
from dpfed.training.job.notes import result_warnings
from dpfed.training.run import run
from dpfed.training.run_folder.files import CONFIG
from dpfed.training.run_folder.folder import fresh_folder, refuse_occupied

CLIENTS = 10
EPSILON = 8.0
DELTA = 1e-5
LR = 1e-3
# Learning rate for a head that is trained alone with noise. Noise enlarges Adam's second moments
# and so shortens its steps. With 1e-3, a head that starts at zero stays too small in 500 steps.
NOISED_HEAD_LR = 1e-2
# Keys that `settings` must not contain, each with the reason. The records are given as arguments.
NOT_FOR_SETTINGS = {
    "data.name": "the records are those of train and test",
    "data.path": "the records are those of train and test",
    "data.classes": "pass classes to fine_tune",
}
# Keywords of `fine_tune`, and the configuration keys that they set.
KEYS = {
    "clients": "data.clients",
    "delta": "privacy.delta",
    "epsilon": "privacy.target_epsilon",
}
MODELS = {"image": "auto-image", "text": "auto-text", "features": "linear"}


@dataclass(frozen=True)
class Tuned:
    """A finished run: its folder, and the result as `dpfed run --json` prints it."""

    out: Path
    result: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set, 0 to 1."""
        return float(self.result["test_accuracy"])

    @property
    def epsilon(self) -> Mapping[str, float | None]:
        """Epsilon for each view: server_worst, server_max and third_party.

        The values are None if the run was not private.
        """
        figures: Mapping[str, float | None] = self.result["epsilon"]
        return figures

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the run, such as how the data were read."""
        return tuple(self.result["notes"])

    @property
    def warnings(self) -> Sequence[str]:
        """Sentences about what to change, or what to know before using the result."""
        return tuple(self.result["warnings"])

    def export(self, folder: str | Path, merge: bool = False) -> Path:
        """Write a peft adapter with its model card to a new folder, and return the folder.

        merge  True to write a whole model instead, with the adapter merged into its base
        """
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
    """Fine-tune a model across simulated clients with differential privacy.

    Args:
        model: A folder or hub name of a Hugging Face model, the model itself, or a name of
            `dpfed list models`. By default only the head of a sentence encoder is trained.
        train: Private records: a dictionary of columns, a data frame or a Hugging Face dataset with
            the columns `label` and `text` (and `text_pair`), `image` or `features`.
        test: Public records of the server, with the same columns.
        clients: Number of simulated clients; default 10. Settings data.partition = "natural" and
            data.client_column take the clients from a column instead.
        epsilon: Target for the server's view of a client in every round. "auto" means 8.0, unless
            settings give privacy.sigma. With None, settings must give privacy.sigma or
            privacy.enabled = False.
        delta: Default 1e-5.
        classes: Class names in the order of their numbers, or their count; default: from labels.
        tokenizer: Tokenizer of a language model in memory.
        settings: Other configuration keys, such as {"algorithm.lr": 1e-3, "run.rounds": 50}.
        out: Folder of the run; default: a new one under runs/.
        progress: Print notes, rounds and the work inside a round to stderr.

    Mistakes raise `dpfed.DpfedError`; warnings are issued as `dpfed.DpfedWarning`.
    """
    with python_phrases():
        _refuse_tokenizer(model, tokenizer)
        target = None if epsilon == "auto" else epsilon
        given = _given({"clients": clients, "delta": delta, "epsilon": target}, settings)
        source = source_of(train, test, classes)
        config = _configured(given, epsilon, model, source.kind)
        _refuse_number_of_clients(config, given, source)
        folder = Path(out) if out is not None else fresh_folder(config)
        if isinstance(model, str | Path):
            return _trained(config, folder, source, progress)
        return _trained_in_memory(model, tokenizer, config, folder, source, progress)


def _refuse_tokenizer(model: Any, tokenizer: Any) -> None:
    if tokenizer is not None and isinstance(model, str | Path):
        raise DpfedError(
            f"tokenizer is for a model in memory, and model = {str(model)!r} has its own: "
            "leave it out, or give model.tokenizer in settings"
        )


def _trained_in_memory(
    model: Any, tokenizer: Any, config: Config, folder: Path, source: Source, progress: bool
) -> Tuned:
    """Save the model beside the run's folder, train it, and return the finished run.

    The saved model makes it possible to repeat the run.
    """
    refuse_occupied(folder, force=False)
    base = _saved(model, tokenizer, folder, config)
    config = replace(config, model=replace(config.model, weights=str(base)))
    try:
        return _trained(config, folder, source, progress)
    finally:
        # Remove the saved model if an error stopped the run before it began.
        if not (folder / CONFIG).exists():
            shutil.rmtree(base)


def _given(keywords: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return keywords and settings as configuration tables.

    Raise DpfedError if a keyword and a setting give different values for one key.
    """
    pairs = _pairs(settings)
    tables = layer_of(pairs)
    for key, why in NOT_FOR_SETTINGS.items():
        if _setting(tables, key) is not None:
            raise DpfedError(f"settings[{key!r}] has no effect: {why}")
    for name, key in KEYS.items():
        value = keywords[name]
        if value is None:
            continue
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
        pairs.append((key, _plain(value)))
    return layer_of(pairs)


def _setting(tables: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key such as "data.clients"; None if the key is not set."""
    section, _, leaf = key.partition(".")
    table = tables.get(section)
    return table.get(leaf) if isinstance(table, Mapping) else None


def _pairs(settings: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the settings as pairs of a dotted key and a plain value."""
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
    """Return a value of a type that TOML has. Paths become texts, NumPy numbers Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _trained(config: Config, folder: Path, source: Source, progress: bool) -> Tuned:
    on_start = OnStart(lambda job: _warn(job.warnings))
    if progress:
        with ProgressDisplay(config.run.rounds, show_warnings=False) as display:
            result = run(config, folder, source=source, callbacks=[display, on_start])
    else:
        result = run(config, folder, source=source, callbacks=[on_start])
    _warn(result_warnings(result))
    return Tuned(folder, result)


def _warn(sentences: Sequence[str]) -> None:
    """Issue the sentences as warnings. They name the line of the user's code that called dpfed."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dpfed."):
        level += 1
        frame = frame.f_back
    for sentence in sentences:
        warnings.warn(sentence, DpfedWarning, stacklevel=level)


def _defaults(given: Mapping[str, Any], epsilon: float | str | None) -> dict[str, Any]:
    """Return the default settings of `fine_tune`. Keywords and `settings` override them."""
    clients = _setting(given, "data.clients") or CLIENTS
    few = isinstance(clients, int) and clients <= 20
    target = {"target_epsilon": EPSILON} if epsilon == "auto" else {}
    return {
        "data": {"name": "given", "clients": CLIENTS},
        "privacy": {"delta": DELTA, "batch": 16, **target},
        "run": {"rounds": 50, "local_steps": 10, "participation": 1.0 if few else 0.1},
    }


def _configured(
    given: Mapping[str, Any], epsilon: float | str | None, model: Any, kind: str
) -> Config:
    """Return the checked configuration for this model and kind of data.

    By default, training changes only the head of a sentence encoder. Its sentence vectors are
    useful without training, because they were made to be compared directly.
    """
    known = registry()
    table = _model_table(given, model, kind)
    algorithm: dict[str, Any] = {"name": "dp-fedadamw", "lr": LR}
    own = overlay(_defaults(given, epsilon), given)
    under = {"model": table, "algorithm": algorithm}
    config = build(overlay(under, own), known)
    if isinstance(model, str | Path) and config.model.adapter is None and is_pooled(config.model):
        table["train"] = "head"
        config = build(overlay(under, own), known)
    head_alone = config.model.train == "head" or config.model.name == "linear"
    if head_alone and config.privacy.enabled:
        algorithm["lr"] = NOISED_HEAD_LR
    return build(overlay(under, own), known)


def _model_table(given: Mapping[str, Any], model: Any, kind: str) -> dict[str, Any]:
    """Return the [model] keys that follow from `model`.

    Raise DpfedError if the settings give another value for one of these keys.
    """
    table: dict[str, Any] = {"name": _setting(given, "model.name") or MODELS[kind]}
    if isinstance(model, str) and model in registry().model:
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
    return table


def _refuse_number_of_clients(config: Config, given: Mapping[str, Any], source: Source) -> None:
    """Raise DpfedError if `clients` differs from the number of names in the client column."""
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
    """Save a model from memory in a new folder beside the run's folder, and return this folder.

    If earlier training of the model has spent privacy, save its spending record, too.
    """
    if not hasattr(model, "save_pretrained"):
        raise DpfedError(
            f"model must be a name, a folder or a Hugging Face model, not {type(model).__name__}"
        )
    if hasattr(config.model, "tokenizer") and config.model.tokenizer is None and tokenizer is None:
        raise DpfedError(
            "a language model in memory needs its tokenizer: "
            "fine_tune(model, ..., tokenizer=tokenizer)"
        )
    base = folder.with_name(folder.name + "-base")
    if base.exists():
        raise DpfedError(f"{base} exists: choose another out")
    # Read the spending record first: if it is damaged, stop before anything is written.
    record = _account(model)
    # Write the record before the weights, so that no weights exist without it. Write it again
    # afterwards: the second call embeds the record in the weights' file.
    if record is not None:
        write_record(base, record)
    model.save_pretrained(str(base))
    if record is not None:
        write_record(base, record)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(base))
    return base


def _account(model: Any) -> str | None:
    """Return the spending record of the files that a model was loaded from; None if unknown."""
    origin = str(getattr(model, "name_or_path", None) or "")
    try:
        stored = record_of(origin) if origin else None
    except HubSilentError:
        # The hub does not answer. Without a record, each epsilon of the run comes with a note that
        # it does not count earlier training.
        return None
    return stored.text if stored else None

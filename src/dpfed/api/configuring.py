"""Build the configuration of a Python call from the user's options and from defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dpfed.api.settings import setting, tables_of, task_of
from dpfed.config import Config, build, nearest, overlay
from dpfed.config.key_history import ADDED
from dpfed.data.sources.in_memory import CLIENT, source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.model.zoo.text import is_pooled
from dpfed.privacy.planning.recipe import METHOD, recipe
from dpfed.registry import registry
from dpfed.training.job.learning_rate import head_alone
from dpfed.training.run_folder.files import read_settings

CLIENTS = 10
EPSILON = 8.0
DELTA = 1e-5
# Default limit on the number of records in a local step, over all clients of a round. There is no
# limit if only a head (last layer) is trained, because that is fast.
MAX_RECORDS = 512
# Keys whose defaults come from `recipe`, the recommended settings of the default algorithm.
RECIPE_KEYS = (
    "algorithm.lr",
    "algorithm.gamma",
    "algorithm.beta1",
    "algorithm.bc_level",
    "privacy.batch",
    "privacy.clip",
    "privacy.clip_mode",
    "run.cohort_choice",
    "run.lr_schedule",
    "run.average",
    "run.max_records_per_step",
)
MODELS = {"image": "auto-image", "text": "auto-text", "features": "linear"}


def defaults(
    given: Mapping[str, Any], epsilon: float | str | None, language: bool = False
) -> dict[str, Any]:
    """Return the default settings of `fine_tune`, which the user's values override.

    given     the user's keywords and `settings` as configuration tables
    epsilon   the keyword `epsilon`
    language  True for a causal language model
    """
    clients = setting(given, "data.clients") or CLIENTS
    few = isinstance(clients, int) and clients <= 20
    target = {"target_epsilon": EPSILON} if epsilon == "auto" else {}
    run = {
        "rounds": 50,
        "local_steps": 10,
        "participation": 1.0 if few else 0.1,
        "cohort_choice": "balanced",
    }
    tables = {
        "data": {"name": "given", "clients": CLIENTS},
        "algorithm": {"name": METHOD},
        "privacy": {"delta": DELTA, "batch": 16, **target},
        "run": run,
    }
    if setting(given, "algorithm.name") in (None, METHOD):
        tables = overlay(tables, recipe(calibrated(given, epsilon), language))
    return tables


def calibrated(given: Mapping[str, Any], epsilon: float | str | None) -> bool:
    """Return True if the noise multiplier is computed from a target epsilon."""
    if setting(given, "privacy.enabled") is False or setting(given, "privacy.sigma") is not None:
        return False
    return epsilon == "auto" or setting(given, "privacy.target_epsilon") is not None


def prepared(
    model: Any, train: Any, test: Any, options: Mapping[str, Any]
) -> tuple[Source, Config]:
    """Return the records and the checked configuration of a call of `fine_tune`."""
    given = tables_of(options)
    source = source_of(train, test, options.get("classes"), task_of(given))
    return source, configured(given, options.get("epsilon", "auto"), model, source)


def configured(
    given: Mapping[str, Any], epsilon: float | str | None, model: Any, source: Source
) -> Config:
    """Return the checked configuration for this model and these data.

    given    the user's keywords and `settings` as configuration tables
    epsilon  the keyword `epsilon`; "auto" for its default

    By default, only the head (last layer) of a sentence encoder is trained. The sentence vectors
    before the head are useful without further training.
    """
    given = with_natural_clients(given, source)
    if source.task == "multilabel":
        given = overlay(dict(given), {"model": {"task": source.task}})
    known = registry()
    table = _model_table(given, model, source.kind)
    unlabelled = not source.classes and source.task == "classify"
    language = unlabelled or setting(given, "model.task") == "causal"
    own = overlay(defaults(given, epsilon, language), given)
    under: dict[str, Any] = {"model": table, "run": {"max_records_per_step": MAX_RECORDS}}
    if not source.classes or source.task != "classify":
        # Other partitions give the clients unequal shares of each class, so every record must have
        # exactly one class.
        under["data"] = {"partition": "iid"}
    config = build(overlay(under, own), known)
    if isinstance(model, str | Path) and config.model.adapter is None and is_pooled(config.model):
        table["train"] = "head"
        config = build(overlay(under, own), known)
    if head_alone(config):
        del under["run"]
        config = build(overlay(under, own), known)
    _refuse_number_of_clients(config, given, source)
    return config


def as_begun(config: Config, given: Mapping[str, Any], folder: Path) -> Config:
    """Return the configuration with which the run in `folder` resumes.

    Defaults can differ between versions of dpfed. Therefore, the run keeps the values that it began
    with, unless the user gives other values.

    given  the user's keywords and `settings` as configuration tables
    """
    begun = read_settings(folder) or {}
    for key in RECIPE_KEYS:
        name, _, leaf = key.partition(".")
        section = getattr(config, name)
        value = (begun.get(name) or {}).get(leaf, ADDED.get(key))
        known = value is not None and name in begun and hasattr(section, leaf)
        if known and setting(given, key) is None:
            config = replace(config, **{name: replace(section, **{leaf: value})})
    return config


def with_natural_clients(given: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """Return `given` with the number of clients of `source`, if it has one data set per client.

    Raise DpfedError if `given` has another number of clients.
    """
    names = source.clients
    if not names:
        return given
    stated = setting(given, "data.clients")
    if stated not in (None, len(names)):
        raise DpfedError(
            f"clients = {stated}, but train has the data of {len(names)}: leave clients out"
        )
    natural = {"partition": "natural", "client_column": CLIENT, "clients": len(names)}
    for key, value in natural.items():
        other = setting(given, f"data.{key}")
        if other not in (None, value):
            raise DpfedError(
                f"settings['data.{key}'] = {other!r} has no effect: train has one data set for "
                "each client"
            )
    return overlay(dict(given), {"data": natural})


def _model_table(given: Mapping[str, Any], model: Any, kind: str) -> dict[str, Any]:
    """Return the keys of the section [model] that follow from the argument `model` of `fine_tune`.

    Raise DpfedError if the settings give another value for one of these keys.
    """
    table: dict[str, Any] = {"name": setting(given, "model.name") or MODELS[kind]}
    if isinstance(model, str) and model in registry().model:
        table = {"name": model}
    elif isinstance(model, str | Path):
        if kind == "features" and not Path(model).exists():
            raise DpfedError(
                f"model = {str(model)!r} is not a file or folder, and no name of "
                f"`dpfed list models`{nearest(str(model), registry().model)}"
            )
        table["weights"] = str(model)
    elif is_plain_module(model):
        table = {"name": "given", "weights": "given"}
        learns = [name for name, x in model.named_parameters() if x.requires_grad]
        some_are_frozen = 0 < len(learns) < len(list(model.parameters()))
        if some_are_frozen and setting(given, "model.train") is None:
            table["train"] = learns
    else:
        table["weights"] = "given"
    for key, value in table.items():
        other = setting(given, f"model.{key}")
        if other not in (None, value):
            shown = repr(str(model)) if isinstance(model, str | Path) else type(model).__name__
            raise DpfedError(
                f"settings['model.{key}'] = {other!r} is not model = {shown}: give one of them"
            )
    return table


def is_plain_module(model: Any) -> bool:
    """Return True for a torch module that is not a model of transformers or peft."""
    return isinstance(model, nn.Module) and not hasattr(model, "save_pretrained")


def _refuse_number_of_clients(config: Config, given: Mapping[str, Any], source: Source) -> None:
    """Raise DpfedError if `clients` differs from the number of names in the client column."""
    data = config.data
    if data.partition != "natural" or data.client_column is None:
        return
    if setting(given, "data.clients") is None:
        return
    owners = source.train.column(data.client_column)
    found = 0 if owners is None else len(set(owners.tolist()))
    if found != data.clients:
        raise DpfedError(
            f"clients = {data.clients}, but the column {data.client_column!r} names {found}: "
            "leave clients out with a natural partition"
        )

"""Turn the keywords and the settings of a Python call into one checked configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from torch import nn

from dpfed.api.options import Options, Terms, split
from dpfed.config import Config, LabelTask, build, nearest, overlay
from dpfed.config.key_history import ADDED
from dpfed.config.parsing import layer_of
from dpfed.data.sources.in_memory import CLIENT
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.model.zoo.text import is_pooled
from dpfed.privacy.planning.federation import FederationPlan
from dpfed.privacy.planning.recipe import METHOD, recipe
from dpfed.registry import registry
from dpfed.training.job.learning_rate import head_alone
from dpfed.training.run_folder.files import read_settings

CLIENTS = 10
EPSILON = 8.0
DELTA = 1e-5
# Most records of a cohort in a local step if more than a head is trained, which takes longer.
MAX_RECORDS = 512
# Keys whose defaults depend on the recipe.
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
    "rounds": "run.rounds",
    "trainable": "model.train",
    "task": "model.task",
    "metric": "run.metric",
    "early_stopping": "run.early_stopping",
    "keep": "run.keep",
    "class_weights": "model.class_weights",
    "algorithm": "algorithm.name",
}
MODELS = {"image": "auto-image", "text": "auto-text", "features": "linear"}


def tables_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `fine_tune` as configuration tables.

    Raise DpfedError if a keyword and a setting give different values for one key.
    """
    keywords, switches = split(options)
    settings = keywords.get("settings")
    if keywords.get("epsilon") == "auto":
        keywords["epsilon"] = None
    if callable(keywords.get("metric")):
        keywords["metric"] = "given"
    _refuse_unknown(switches)
    pairs = _pairs(settings)
    planned = _planned(keywords.get("plan"), layer_of(pairs))
    pairs += planned.items()
    tables = layer_of(pairs)
    for key, why in NOT_FOR_SETTINGS.items():
        if setting(tables, key) is not None:
            raise DpfedError(f"settings[{key!r}] has no effect: {why}")
    if setting(tables, "privacy.enabled") is False and keywords.get("epsilon") is not None:
        raise DpfedError(
            f"epsilon = {keywords['epsilon']!r} and settings['privacy.enabled'] = False exclude "
            "each other: pass epsilon=None to train without privacy"
        )
    keyed = {name: value for name, value in keywords.items() if name in KEYS and value is not None}
    given = {KEYS[name]: (name, value) for name, value in keyed.items()}
    given |= {f"algorithm.{name}": (name, value) for name, value in switches.items()}
    for key, (name, value) in given.items():
        value = _plain(value)
        other = setting(tables, key)
        if other is not None and other != value:
            origin = f"{key} of the plan" if key in planned else f"settings[{key!r}]"
            raise DpfedError(
                f"{name} = {value!r} and {origin} = {other!r} differ: give one of them"
            )
        pairs.append((key, value))
    return layer_of(pairs)


def _planned(plan: FederationPlan | None, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a plan sets, with their values.

    Raise DpfedError if the settings, as `tables`, give another value for one of them.
    """
    if plan is None:
        return {}
    if not isinstance(plan, FederationPlan):
        raise DpfedError(f"plan must come from dpfed.plan, not from {type(plan).__name__}")
    planned: dict[str, Any] = {"data.clients": plan.federation.clients}
    for section, keys in plan.settings.items():
        planned |= {f"{section}.{key}": value for key, value in keys.items()}
    for key, value in planned.items():
        other = setting(tables, key)
        if other is not None and other != value:
            raise DpfedError(
                f"{key} of the plan = {value!r} and settings[{key!r}] = {other!r} differ: "
                "give one of them"
            )
    return {key: value for key, value in planned.items() if setting(tables, key) is None}


def _refuse_unknown(switches: Mapping[str, Any]) -> None:
    """Raise DpfedError for the first keyword that is no switch of any algorithm."""
    algorithms = registry().algorithm.values()
    known = {field.name for cls in algorithms for field in dataclasses.fields(cls)}
    for name in switches:
        if name not in known:
            raise DpfedError(
                f"{name} is no keyword of fine_tune and no switch of an algorithm"
                f"{nearest(name, [*Options.__annotations__, *sorted(known)])}"
            )


def task_of(options: Mapping[str, Any]) -> LabelTask:
    """Return what a label is, by the keyword `task` or the setting model.task."""
    task = setting(tables_of(options), "model.task")
    known = get_args(get_args(get_type_hints(Terms)["task"])[0])
    if task is not None and task not in known:
        raise DpfedError(
            f"task = {task!r} must be one of {', '.join(known)}{nearest(str(task), known)}"
        )
    return task if task in ("regress", "multilabel") else "classify"


def setting(tables: Mapping[str, Any], key: str) -> Any:
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


def defaults(
    given: Mapping[str, Any], epsilon: float | str | None, language: bool = False
) -> dict[str, Any]:
    """Return the default settings of `fine_tune`. Keywords and `settings` override them.

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
    """Return True if the noise follows from a target epsilon."""
    if setting(given, "privacy.enabled") is False or setting(given, "privacy.sigma") is not None:
        return False
    return epsilon == "auto" or setting(given, "privacy.target_epsilon") is not None


def configured(options: Mapping[str, Any], model: Any, source: Source) -> Config:
    """Return the checked configuration for this model and these data.

    By default, training changes only the head of a sentence encoder. Its sentence vectors are
    useful without training, because they were made to be compared directly.
    """
    given = with_natural_clients(tables_of(options), source)
    epsilon = options.get("epsilon", "auto")
    known = registry()
    table = _model_table(given, model, source.kind)
    unlabelled = not source.classes and source.task == "classify"
    language = unlabelled or setting(given, "model.task") == "causal"
    own = overlay(defaults(given, epsilon, language), given)
    under: dict[str, Any] = {"model": table, "run": {"max_records_per_step": MAX_RECORDS}}
    if not source.classes or source.task != "classify":
        # Without one class for each record, there are none to deal out unequally.
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


def as_begun(config: Config, options: Mapping[str, Any], folder: Path) -> Config:
    """Return the configuration with which the run in `folder` resumes.

    A default can be "auto" or differ between versions. So the run keeps the values that it began
    with, unless the user gives others.
    """
    begun = read_settings(folder) or {}
    given = tables_of(options)
    for key in RECIPE_KEYS:
        name, _, leaf = key.partition(".")
        section = getattr(config, name)
        value = (begun.get(name) or {}).get(leaf, ADDED.get(key))
        known = value is not None and name in begun and hasattr(section, leaf)
        if known and setting(given, key) is None:
            config = replace(config, **{name: replace(section, **{leaf: value})})
    return config


def with_natural_clients(given: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """Return the tables with the clients of `source`, if it has one data set per client.

    Raise DpfedError if the tables give another number of clients.
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
    """Return the keys of the section [model] that the argument `model` determines.

    Raise DpfedError if the settings give another value for one of these keys.
    """
    table: dict[str, Any] = {"name": setting(given, "model.name") or MODELS[kind]}
    if isinstance(model, str) and model in registry().model:
        table = {"name": model}
    elif isinstance(model, str | Path):
        table["weights"] = str(model)
    elif is_plain_module(model):
        table = {"name": "given", "weights": "given"}
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

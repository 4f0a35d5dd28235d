"""Turn the keywords and the settings of a Python call into configuration tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfed.api.options import Options, choices_of, split
from dpfed.api.words import KEYS, refuse_unknown
from dpfed.config import LabelTask, nearest
from dpfed.config.parsing import layer_of
from dpfed.errors import DpfedError
from dpfed.privacy.planning.federation import FederationPlan
from dpfed.privacy.planning.recipe import METHOD
from dpfed.registry import registry

# Keys that `settings` must not contain, each with the reason.
NOT_FOR_SETTINGS = {
    "data.name": "the records are those of train and test",
    "data.path": "the records are those of train and test",
    "data.classes": "pass classes to fine_tune",
}


def tables_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `fine_tune` as configuration tables, one dictionary per section.

    Raise DpfedError if a keyword and an entry of `settings` give different values for one key.
    """
    keywords, switches = split(options)
    _refuse_values(keywords)
    pairs = _pairs(keywords.get("settings"))
    planned = _planned(keywords.get("plan"), layer_of(pairs))
    pairs += planned.items()
    tables = layer_of(pairs)
    for key, why in NOT_FOR_SETTINGS.items():
        if setting(tables, key) is not None:
            raise DpfedError(f"settings[{key!r}] has no effect: {why}")
    _refuse_noise(keywords, tables)
    algorithm = keywords.get("algorithm") or setting(tables, "algorithm.name") or METHOD
    _refuse_switches(switches, str(algorithm))
    given = {KEYS[name]: (name, keywords[name]) for name in KEYS if keywords.get(name) is not None}
    given |= {f"algorithm.{name}": (name, value) for name, value in switches.items()}
    if keywords.get("epsilon") == "auto":
        del given[KEYS["epsilon"]]
    if callable(keywords.get("metric")):
        given[KEYS["metric"]] = ("metric", "given")
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


def _refuse_values(keywords: Mapping[str, Any]) -> None:
    """Raise DpfedError for a string that is not allowed, or an empty `trainable`.

    An example is task="clasify".
    """
    for name in ("task", "metric", "keep"):
        value, known = keywords.get(name), choices_of(name)
        if isinstance(value, str) and value not in known:
            more = ", or a function" if name == "metric" else ""
            raise DpfedError(
                f"{name} = {value!r} must be one of {', '.join(known)}{more}{nearest(value, known)}"
            )
    trainable = keywords.get("trainable")
    if isinstance(trainable, Sequence) and not trainable:
        raise DpfedError('trainable names nothing: give "lora", "head", "full" or a list of names')


def _refuse_noise(keywords: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Raise DpfedError if `epsilon` contradicts `settings`, or if neither sets the noise."""
    epsilon = keywords.get("epsilon", "auto")
    off = setting(tables, "privacy.enabled") is False
    if off and epsilon is not None and "epsilon" in keywords:
        raise DpfedError(
            f"epsilon = {epsilon!r} and settings['privacy.enabled'] = False exclude each other: "
            "pass epsilon=None to train without privacy"
        )
    stated = [setting(tables, f"privacy.{key}") for key in ("sigma", "target_epsilon")]
    if epsilon is None and not off and stated == [None, None]:
        raise DpfedError(
            'epsilon = None needs settings={"privacy.sigma": 1.0}, the noise, or '
            'settings={"privacy.enabled": False} to train without privacy'
        )


def _refuse_switches(switches: Mapping[str, Any], algorithm: str) -> None:
    """Raise DpfedError for the first keyword that is no switch (own option) of the algorithm."""
    algorithms = registry().algorithm
    every = {field.name for cls in algorithms.values() for field in dataclasses.fields(cls)}
    known = [*Options.__annotations__, *sorted(every)]
    refuse_unknown("fine_tune and no switch of an algorithm", switches, known)
    if algorithm not in algorithms:
        # `config.build`, which is called later, reports an unknown algorithm.
        return
    own = [field.name for field in dataclasses.fields(algorithms[algorithm])]
    for name in switches:
        if name not in own:
            raise DpfedError(
                f"{name} is no switch of {algorithm}: its switches are {', '.join(own)}"
            )


def _planned(plan: FederationPlan | None, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a plan of `dpfed.plan` gives to configuration keys, as tables.

    Keys that the user's settings, `tables`, already have are left out. Raise DpfedError if the
    user's value differs from the plan's value.
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


def task_of(given: Mapping[str, Any]) -> LabelTask | None:
    """Return the kind of labels that the key model.task asks for.

    Return None if the kind is to be found from the labels.
    """
    task = setting(given, "model.task")
    if task in (None, "auto"):
        return None
    return task if task in ("regress", "multilabel") else "classify"


def setting(tables: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, such as "data.clients", in `tables`; None if it is not set."""
    section, _, leaf = key.partition(".")
    table = tables.get(section)
    return table.get(leaf) if isinstance(table, Mapping) else None


def _pairs(settings: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the settings as pairs of a dotted key, such as "run.rounds", and a TOML value."""
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
    """Convert a value to a type that TOML has: paths to strings, arrays and tensors to lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value

"""Load a checked `Config` from TOML files and overrides, and write a `Config` as TOML."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from dpfed.config.checks import check
from dpfed.config.parsing import nearest, overrides_layer, parse
from dpfed.config.sections import (
    Config,
    DataSection,
    FederationSection,
    LoraSection,
    ModelSection,
    PrivacySection,
    RunSection,
)
from dpfed.errors import DpfedError


@dataclass(frozen=True)
class Registry:
    """The names that a configuration can use: data sources, models, algorithms and presets."""

    data: Mapping[str, type[DataSection]]
    model: Mapping[str, type[ModelSection]]
    algorithm: Mapping[str, type[Any]]
    presets: Mapping[str, Path] = field(default_factory=dict)


# If an override changes the `name` in a section (another data source, model or algorithm), only
# these keys of the section stay. All other keys were options of the previous choice.
COMMON: dict[str, frozenset[str]] = {
    "algorithm": frozenset(),
    "model": frozenset(),
    "data": frozenset(f.name for f in dataclasses.fields(DataSection)),
}
# Names of settings in other programs, each with the name of the same setting in dpfed, for hints in
# error messages.
SYNONYMS = {
    "epsilon": "target_epsilon",
    "batch_size": "batch",
    "learning_rate": "lr",
    "noise_multiplier": "sigma",
    "max_grad_norm": "clip",
    "clip_norm": "clip",
    "num_clients": "clients",
    "num_rounds": "rounds",
}
EXCLUSIVE = (frozenset({"sigma", "target_epsilon"}), frozenset({"batch", "rate"}))


def load(source: str | Path, overrides: Sequence[str], registry: Registry) -> Config:
    """Return the checked configuration of a preset or TOML file with `key=value` overrides."""
    return build(overlay(read(source, registry), overrides_layer(overrides)), registry)


def read(source: str | Path, registry: Registry, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the tables of a preset or TOML file as dictionaries, not yet checked.

    If the file names another file or preset in `extends`, return the keys of both files. The keys
    of the first file take precedence.
    """
    path = registry.presets.get(str(source), Path(source))
    if path in _seen:
        raise DpfedError(f"{path} extends itself")
    raw = _read_toml(path, source, registry)
    table = raw.get("model")
    # This file is config.toml in the folder of a run, which lists every key. If a language model
    # has no `pooling` there, the run is older than this key and used no pooling.
    if (path.parent / "run.json").is_file() and isinstance(table, dict) and "max_length" in table:
        table.setdefault("pooling", None)
    base = raw.pop("extends", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise DpfedError(f"{path}: extends = {base!r} must be the name of a file or preset")
    parent = base if base in registry.presets else path.parent / base
    return overlay(read(parent, registry, (*_seen, path)), raw)


def _read_toml(path: Path, source: str | Path, registry: Registry) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = nearest(str(source), registry.presets)
        sentence = f"there is no configuration {source}: give a TOML file or a preset{hint}"
    except tomllib.TOMLDecodeError as error:
        sentence = f"{path} is not valid TOML: {error}"
    except RecursionError:
        sentence = f"{path} is nested too deeply for a configuration"
    except (OSError, ValueError) as error:
        # A ValueError means that the text is not UTF-8, a number has thousands of digits, or the
        # path is impossible.
        sentence = f"the configuration {str(path)!r} cannot be read: {error}"
    raise DpfedError(sentence)


def overlay(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations: return the keys of both; values in `over` take precedence.

    Nested tables are merged too. If `over` changes the `name` in a section, drop the options that
    belong to the old name.
    """
    out = dict(under)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict):
            if key in COMMON and "name" in value and "name" in old and value["name"] != old["name"]:
                old = {k: v for k, v in old.items() if k in COMMON[key]}
            out[key] = overlay(old, value)
        else:
            out[key] = value
    for pair in EXCLUSIVE:
        # A pair has two keys that exclude each other. If `over` sets one of them, drop the other
        # key, which `under` has set. If `over` sets both, keep both, and `build` raises an error.
        stated = {name for name in pair if over.get(name) is not None}
        if len(stated) == 1:
            for name in pair - stated:
                out.pop(name, None)
    return out


def build(raw: Mapping[str, Any], registry: Registry) -> Config:
    """Return the checked configuration from the tables that `read` or `overlay` returned."""
    sections = [f.name for f in dataclasses.fields(Config)]
    for key, value in raw.items():
        if key not in sections:
            hint = nearest(key, sections)
            names = key_names(key, registry)
            if names and not isinstance(value, Mapping):
                hint = f": write {' or '.join(names)}"
            raise DpfedError(f"[{key}] is not a section of the configuration{hint}")
        if not isinstance(value, Mapping):
            raise DpfedError(f"{key} = {value!r} must be a table, [{key}]")
    federation = None
    if "federation" in raw:
        federation = parse("federation", FederationSection, raw["federation"])
    config = Config(
        data=_named("data", raw, registry.data, DataSection.name),
        model=_named("model", raw, registry.model, ModelSection.name),
        algorithm=_named("algorithm", raw, registry.algorithm, "dp-fedadamw"),
        privacy=parse("privacy", PrivacySection, raw.get("privacy", {})),
        run=parse("run", RunSection, raw.get("run", {})),
        federation=federation,
    )
    check(config)
    return config


LISTED_AS = {"data": "datasets", "model": "models", "algorithm": "algorithms"}


def _named(
    section: str, raw: Mapping[str, Any], known: Mapping[str, type[Any]], default: str
) -> Any:
    """Return a section as an object of the class that the key `name` of the section selects.

    known    the classes by name, such as all models for the section "model"
    default  name to use if the section has none
    """
    table = dict(raw.get(section, {}))
    name = table.pop("name", default)
    if not isinstance(name, str) or name not in known:
        raise DpfedError(
            f"{section}.name = {name!r} is not known{nearest(str(name), known)}; "
            f"`dpfed list {LISTED_AS[section]}` shows what there is"
        )
    return parse(section, known[name], table)


def key_names(word: str, registry: Registry) -> list[str]:
    """Return the full names of all configuration keys with the short name `word`, as "run.rounds".

    If there is none, return the names of the key with the most similar spelling. The list is empty
    if no key is similar.
    """
    found = all_keys(registry)
    word = SYNONYMS.get(word, word)
    close = [word] if word in found else difflib.get_close_matches(word, found, n=1, cutoff=0.65)
    return found[close[0]] if close else []


def all_keys(registry: Registry) -> dict[str, list[str]]:
    """Return the full names of all keys by short name, such as {"lr": ["algorithm.lr"]}.

    Keys whose value is a table are left out.
    """
    classes: dict[str, list[type[Any]]] = {
        "data": [DataSection, *registry.data.values()],
        "model": [ModelSection, *registry.model.values()],
        "model.lora": [LoraSection],
        "algorithm": list(registry.algorithm.values()),
        "privacy": [PrivacySection],
        "run": [RunSection],
        "federation": [FederationSection],
    }
    found: dict[str, list[str]] = {}
    for section, kinds in classes.items():
        fields = [f for cls in kinds for f in dataclasses.fields(cls)]
        plain = [f.name for f in fields if f.default_factory is dataclasses.MISSING]
        for name in dict.fromkeys(plain):
            found.setdefault(name, []).append(f"{section}.{name}")
    return found


def to_dict(config: Config) -> dict[str, Any]:
    """Return a configuration as dictionaries. Keys that are None are left out: TOML has no null."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {name: plain(item) for name, item in items.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    tables: dict[str, Any] = plain(config)
    tables["algorithm"] = {"name": config.algorithm.name, **tables["algorithm"]}
    return tables


def to_toml(config: Config) -> str:
    return tomli_w.dumps(to_dict(config))

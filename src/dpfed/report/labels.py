"""Labels of runs on a page: the method's name and the settings that tell it from the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dpfed.privacy.published import show_setting

# Keys that change nothing in what the numbers mean: runs that differ only in these are one method.
ALIKE = frozenset(
    {
        "run.seed",
        "run.device",
        "run.threads",
        "run.fleet_size",
        "run.max_slots",
        "run.slots",
        "run.compile",
        "run.graphs",
        "run.features",
        "run.checkpoint_every",
        "run.memory_limit",
        "run.timeout",
        "run.diagnostics",
        "run.trackers",
    }
)
MAX_SETTINGS = 4  # settings in a label; a table on the page has all of them
MAX_LETTERS = 60

Settings = Mapping[str, Any]
"""The settings of a run by dotted keys."""


def labels(shown: Sequence[Settings], whole: Sequence[Settings] | None = None) -> list[str]:
    """Return a different label for each group of runs: its algorithm and the settings that differ.

    shown  the settings that may be named on the page
    whole  all settings; a difference in hidden ones is named without its value
    """
    names = [str(table.get("algorithm.name", "run")) for table in shown]
    settings = []
    for table, name in zip(shown, names, strict=True):
        same = [other for other, its in zip(shown, names, strict=True) if its == name]
        own = [key for key in table if key.startswith("algorithm.") and differs(key, same)]
        common = [key for key in table if not key.startswith("algorithm.") and differs(key, shown)]
        keys = [key for key in (*own, *common) if key != "algorithm.name"]
        settings.append([f"{key_in_words(key)} {value_in_words(table[key])}" for key in keys])
    named = list(zip(names, settings, strict=True))
    short = [_joined(name, words[:MAX_SETTINGS], len(words)) for name, words in named]
    full = [_joined(name, words, len(words)) for name, words in named]
    return apart(short if len(set(short)) == len(set(full)) else full, shown, whole or shown)


def _joined(name: str, words: Sequence[str], count: int) -> str:
    more = [f"{count - len(words)} more settings"] if count > len(words) else []
    return ", ".join([name, *words, *more])


def apart(
    labels: Sequence[str],
    shown: Sequence[Settings],
    whole: Sequence[Settings],
    places: Sequence[str] | None = None,
) -> list[str]:
    """Return the labels, equal ones with the settings in which they differ.

    places  where each was read, for those without any different setting
    """
    out = list(labels)
    for at in _equal(out):
        words = _different([shown[i] for i in at], [whole[i] for i in at])
        for i, own in zip(at, words, strict=True):
            out[i] = ", ".join([out[i], *own])
    for at in _equal(out) if places else ():
        for i in at:
            out[i] = f"{out[i]}, {places[i]}" if places else out[i]
    for at in _equal(out):
        for number, i in enumerate(at, 1):
            out[i] = f"{out[i]}, no. {number}"
    return out


def _equal(labels: Sequence[str]) -> list[list[int]]:
    """Return the places of labels that occur more than once, those of each label together."""
    found: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        found.setdefault(label, []).append(i)
    return [at for at in found.values() if len(at) > 1]


def _different(shown: Sequence[Settings], whole: Sequence[Settings]) -> list[list[str]]:
    """Return for each table the settings that differ; hidden values are numbered."""
    out: list[list[str]] = [[] for _ in whole]
    every_key = dict.fromkeys(key for table in whole for key in table)
    keys = [key for key in every_key if differs(key, whole)]
    for key in keys[:MAX_SETTINGS]:
        values = [json.dumps(table.get(key), default=str) for table in whole]
        words = [value_in_words(table[key]) if key in table else "" for table in shown]
        can_be_named = len(set(words)) == len(set(values))
        for i, value in enumerate(values):
            number = 1 + list(dict.fromkeys(values)).index(value)
            word = words[i] or "not set"
            out[i].append(f"{key_in_words(key)} {word if can_be_named else f'no. {number}'}")
    return out


def differs(key: str, tables: Sequence[Settings]) -> bool:
    """Return True if the tables have different values of a key that matters."""
    values = {json.dumps(table.get(key), default=str) for table in tables}
    return key not in ALIKE and len(values) > 1


def key_in_words(key: str) -> str:
    """Return a short name of a key: "lr" of algorithm.lr, "data" of data.name."""
    section, _, name = key.partition(".")
    return section if name == "name" else name or section


def value_in_words(value: Any) -> str:
    """Return a value for a label: numbers exactly, of long texts the end, as in paths."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return text if len(text) <= MAX_LETTERS else f"…{text[1 - MAX_LETTERS :]}"
    return show_setting(value)

"""Labels of runs on a report page: the method's name, and the settings that differ between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from dpfed.privacy.published import show_setting

# Settings that do not define the method, such as the seed. Runs that differ only in these settings
# are shown together, as several seeds of one method.
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
# Largest number of settings in a label. A separate table on the page lists all settings.
MAX_SETTINGS = 4
MAX_LETTERS = 60

Settings = Mapping[str, Any]
"""The settings of a run by dotted keys."""


def labels(shown: Sequence[Settings], whole: Sequence[Settings] | None = None) -> list[str]:
    """Return a unique label for each group of runs: its algorithm and the settings that differ.

    shown  the settings of each group that the page may show
    whole  all settings of each group; if a hidden one differs, the label shows a number for it
    """
    names = [str(table.get("algorithm.name", "run")) for table in shown]
    settings = []
    for table, name in zip(shown, names, strict=True):
        same = [other for other, its in zip(shown, names, strict=True) if its == name]
        own = [key for key in table if key.startswith("algorithm.") and differs(key, same)]
        keys = own + [k for k in table if not k.startswith("algorithm.") and differs(k, shown)]
        settings.append([f"{key_in_words(key)} {value_in_words(table[key])}" for key in keys])
    full = [", ".join([name, *words]) for name, words in zip(names, settings, strict=True)]
    short = list(map(_shortened, names, settings))
    return apart(short if len(set(short)) == len(set(full)) else full, shown, whole or shown)


def _shortened(name: str, words: Sequence[str]) -> str:
    left = len(words) - MAX_SETTINGS
    more = [f"{left} more settings"] if left > 0 else []
    return ", ".join([name, *words[:MAX_SETTINGS], *more])


def apart(
    labels: Sequence[str],
    shown: Sequence[Settings],
    whole: Sequence[Settings],
    places: Sequence[str] | None = None,
) -> list[str]:
    """Return the labels, with additions that make equal labels different.

    First the settings that differ are added. If labels are still equal, the entries of `places` are
    added, and then numbers.

    shown, whole  settings of each label, as in the function `labels`
    places        text for each label that says where its runs come from, such as "study 1"
    """
    out = list(labels)
    for at in _equal(out):
        words = _different([shown[i] for i in at], [whole[i] for i in at])
        for i, own in zip(at, words, strict=True):
            out[i] = ", ".join([out[i], *own])
    if places is not None:
        for i in chain(*_equal(out)):
            out[i] += f", {places[i]}"
    for at in _equal(out):
        for number, i in enumerate(at, 1):
            out[i] += f", no. {number}"
    return out


def _equal(labels: Sequence[str]) -> list[list[int]]:
    """Find labels that occur more than once; return for each of them the list of its positions."""
    found: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        found.setdefault(label, []).append(i)
    return [at for at in found.values() if len(at) > 1]


def _different(shown: Sequence[Settings], whole: Sequence[Settings]) -> list[list[str]]:
    """Return for each group of runs the settings that differ between the groups, as text.

    At most MAX_SETTINGS settings are used. A number replaces a value that the page must not show.

    shown  the settings of each group that the page may show
    whole  all settings of each group
    """
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
    """Return True if the tables of settings differ in `key`; always False for the keys in ALIKE."""
    values = {json.dumps(table.get(key), default=str) for table in tables}
    return key not in ALIKE and len(values) > 1


def key_in_words(key: str) -> str:
    """Return a short name of a configuration key: "lr" for algorithm.lr, "data" for data.name."""
    section, _, name = key.partition(".")
    return section if name == "name" else name or section


def value_in_words(value: Any) -> str:
    """Return the value of a setting as text. A long text, such as a path, is cut at its start."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return text if len(text) <= MAX_LETTERS else f"…{text[1 - MAX_LETTERS :]}"
    return show_setting(value)

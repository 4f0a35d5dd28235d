"""The keyword arguments: every switch of every algorithm is typed and shown."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import dpfed
from dpfed.algorithms import REGISTRY
from dpfed.api.options import Options, Switches, split


def test_the_switches_are_the_keys_of_all_algorithms() -> None:
    kinds: dict[str, set[object]] = {}
    for cls in REGISTRY.values():
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            kinds.setdefault(field.name, set()).add(hints[field.name])
    stated = get_type_hints(Switches)
    assert stated.keys() == kinds.keys()
    for name, found in kinds.items():
        assert stated[name] in found, name


def test_help_and_notebooks_show_every_keyword() -> None:
    shown = inspect.signature(dpfed.fine_tune).parameters
    assert set(get_type_hints(Options)) <= set(shown)
    assert list(shown)[:3] == ["model", "train", "test"]


def test_options_are_split_into_keywords_and_switches() -> None:
    assert split({"clients": 3, "lr": 0.1, "own": 1}) == ({"clients": 3}, {"lr": 0.1, "own": 1})

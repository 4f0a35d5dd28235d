"""The keyword arguments: every switch of every algorithm is typed and shown."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

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


@pytest.mark.parametrize("function", [dpfed.fine_tune, dpfed.compare, dpfed.tune])
def test_signatures_are_complete(function: Callable[..., object]) -> None:
    """Each keyword is named, with its type, so that `help` needs no other page."""
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is not p.VAR_KEYWORD and p.annotation is not p.empty for p in parameters)


def test_the_switches_of_the_default_algorithm_reach_the_run(tmp_path: Path) -> None:
    rows = {"features": [[0.0], [1.0]] * 10, "label": [0, 1] * 10}
    test = {"features": [[0.1], [0.9]], "label": [0, 1]}
    switches = {"gamma": 0.25, "agg": "off", "bc": False, "beta2": 0.9, "lr": 0.02}
    found = dpfed.fine_tune(
        "linear", rows, test, clients=2, rounds=1, epsilon=8.0, out=tmp_path / "run",
        algorithm="dp-fedadamw", progress=False, settings={"privacy.batch": 4.0}, **switches,
    )  # fmt: skip
    stored = tomllib.loads((found.out / "config.toml").read_text())["algorithm"]
    assert {key: stored[key] for key in switches} == switches


def test_options_are_split_into_keywords_and_switches() -> None:
    assert split({"clients": 3, "lr": 0.1, "own": 1}) == ({"clients": 3}, {"lr": 0.1, "own": 1})

"""Progress inside a round: counts of steps and of records, independent of the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_case import Watcher
from export_case import base, images, settings

from dpfed.config import load
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import prepare
from dpfed.training.round_context import first_state
from dpfed.training.run import run

torch.set_num_threads(1)
SMALL = [
    "data.clients=4",
    "run.participation=1.0",
    "run.rounds=2",
    "run.local_steps=3",
    "model.name=linear",
]


def activities(folder: Path, *keys: str) -> list[Activity]:
    seen: list[Activity] = []
    run(
        load("digits", [*SMALL, *keys], registry()),
        folder,
        callbacks=[Watcher(on_activity=seen.append)],
    )
    return seen


def test_local_steps_of_all_clients_are_counted(tmp_path: Path) -> None:
    seen = activities(tmp_path / "run")
    steps = [(a.round, a.done, a.total) for a in seen if a.name == "local steps"]
    assert steps == [(t, 4 * k, 12) for t in (1, 2) for k in range(3)]
    assert any(a.name == "test records" and a.round is None for a in seen)


def test_steps_are_counted_over_all_fleets_of_a_cohort(tmp_path: Path) -> None:
    seen = activities(tmp_path / "run", "run.fleet_size=2", "run.rounds=1")
    assert [a.done for a in seen if a.name == "local steps"] == [0, 2, 4, 6, 8, 10]


def test_counts_do_not_depend_on_the_drawn_records(tmp_path: Path) -> None:
    one, other = (activities(tmp_path / seed, f"run.seed={seed}") for seed in ("1", "2"))
    assert one == other


def test_steps_before_an_out_of_memory_error_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Activity] = []
    job = replace(prepare(load("digits", SMALL, registry())), on_activity=seen.append)
    original = type(job.algorithm).step
    calls = []

    def step(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return original(self, *given)

    fleet = Fleet(job)
    monkeypatch.setattr(type(job.algorithm), "step", step)
    fleet.run_cohort(1, first_state(job), range(4))
    steps = [a.done for a in seen if a.name == "local steps"]
    assert steps == [0, 4, 0, 2, 4, 6, 8, 10]


def test_features_are_counted_by_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpfed.model.per_sample.gradients.PerSample.records_at_once", lambda self, device: 10
    )
    seen: list[Activity] = []
    model = {"name": "auto-image", "weights": base("vit", tmp_path / "base"), "train": "head"}
    run(
        settings(model, run={"features": True}),
        tmp_path / "run",
        source=images(),
        callbacks=[Watcher(on_activity=seen.append)],
    )
    features = [a for a in seen if a.name == "features of records"]
    assert [(a.done, a.total, a.round) for a in features] == [
        (0, 24, None),
        (10, 24, None),
        (20, 24, None),
        (0, 6, None),
    ]

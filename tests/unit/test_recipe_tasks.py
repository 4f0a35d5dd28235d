"""The drivers of docs/recipe.md: joint runs equal the library's, and the pages are up to date."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dpfed.training.job.job import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "experiments")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in [n for n in sys.modules if n.startswith("recipe_")]:
        del sys.modules[name]


@pytest.fixture
def features(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    np.savez(tmp_path / "small.npz", x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])
    return tmp_path


SETTINGS = ("data.clients=3", "run.participation=1.0", "run.rounds=3", "run.local_steps=2")


@pytest.mark.parametrize("name", ["dp-fedadamw", "dp-fedavg"])
@pytest.mark.parametrize("clip", ["automatic", "flat"])
def test_joint_runs_equal_the_library(module: Any, features: Path, name: str, clip: str) -> None:
    tasks = module("recipe_tasks")
    runs = module("recipe_runs")
    more = ("privacy.target_epsilon=8.0", "privacy.batch=8.0", f"privacy.clip_mode={clip}")
    task = tasks.Task("small", "report", "Small", (*SETTINGS, *more), "small.npz")
    job = prepare(task.config(features, 0, (f"algorithm.name={name}", "algorithm.lr=0.05")))
    assert runs.check(job) < 1e-5
    # The whole run, beside a run with another rate.
    rows = [runs.Row(0.05), runs.Row(0.5)]
    (one, other) = runs.train(job, rows, [0.95])
    assert runs.scores(job, one[0.95]) == pytest.approx(runs.alone(job), rel=1e-4)
    assert not np.allclose(one[0.95], other[0.95])


def test_a_task_measures_the_recipes_rate_and_the_others(module: Any, features: Path) -> None:
    tasks = module("recipe_tasks")
    more = ("privacy.target_epsilon=8.0",)
    task = tasks.Task("small", "report", "Small", (*SETTINGS, *more), "small.npz", (0.01, 0.1))
    rows = tasks.measure(task, task.config(features, 0), tasks.JobCache())
    assert [row["origin"] for row in rows] == ["recipe", "grid", "grid"]
    assert rows[0]["epsilon"] <= 8.0
    found, points = tasks.distance(task, [{k: str(v) for k, v in row.items()} for row in rows])
    best = max(row["accuracy"] for row in rows)
    assert points == pytest.approx(100 * (best - rows[0]["accuracy"]))
    assert found["lr"] == rows[0]["lr"]


def test_a_rate_with_fewer_seeds_does_not_count(module: Any) -> None:
    tasks = module("recipe_tasks")
    runs = [("recipe", "0.1", 0.7), ("grid", "1", 0.9), ("recipe", "0.1", 0.8)]
    rows = [{"origin": o, "lr": lr, "accuracy": str(score)} for o, lr, score in runs]
    found, points = tasks.distance(tasks.Task("small", "report", "Small", ()), rows)
    assert points == 0
    assert found["best"] == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["recipe_tasks", "recipe_candidates", "recipe_flagship"])
def test_the_pages_are_those_of_the_rows(module: Any, name: str) -> None:
    assert module(name).page(check=True) == 0

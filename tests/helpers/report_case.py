"""Small runs for reports: two methods, one with two seeds, with diagnostics and a budget."""

from __future__ import annotations

from pathlib import Path

from dpfed.config import load
from dpfed.registry import registry
from dpfed.training.run import run

KEYS = (
    "model.name=linear data.clients=8 run.rounds=3 run.local_steps=1 run.participation=0.5 "
    "privacy.batch=32 privacy.sigma=2 run.diagnostics=true run.checkpoint_every=0 privacy.budget=9"
)
SEEDS = {
    "adam-0": ("dp-fedadamw", 0),
    "adam-1": ("dp-fedadamw", 1),
    "avg-987654321": ("dp-fedavg", 987654321),
}


def make_run(path: Path, algorithm: str, seed: int, *more: str) -> Path:
    keys = [
        *KEYS.split(),
        f"algorithm.name={algorithm}",
        "algorithm.lr=0.05",
        f"run.seed={seed}",
        *more,
    ]
    run(load("digits", keys, registry()), path)
    return path


def make_runs(folder: Path) -> list[Path]:
    return [make_run(folder / name, *what) for name, what in SEEDS.items()]

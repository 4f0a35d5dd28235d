"""The demonstration, `dpfed run` without arguments."""

from __future__ import annotations

from pathlib import Path

from dpfed.config import load
from dpfed.registry import DEFAULT, registry
from dpfed.training.run import run


def test_the_demonstration_learns_within_its_budget(tmp_path: Path) -> None:
    result = run(load(DEFAULT, [], registry()), tmp_path / "r")
    assert result["test_accuracy"] >= 0.85
    assert result["test_accuracy"] >= result["start_accuracy"] + 0.10
    assert result["epsilon"]["server_worst"] <= 8
    assert result["delta"] == 1e-5

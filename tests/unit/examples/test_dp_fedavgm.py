"""The worked example of docs/guides/add-an-algorithm.md: by hand, a property, and a run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from algorithm_case import curved, make_space, noisy, run_rounds, start_point, tables

from dpfed.algorithms import REGISTRY
from dpfed.algorithms.dp_fedavg import DPFedAvg

FILE = Path(__file__).parents[3] / "examples" / "dp_fedavgm.py"
SPEC = importlib.util.spec_from_file_location("dp_fedavgm", FILE)
assert SPEC is not None
assert SPEC.loader is not None
MODULE = importlib.util.module_from_spec(SPEC)
sys.modules["dp_fedavgm"] = MODULE
SPEC.loader.exec_module(MODULE)
DPFedAvgM = MODULE.DPFedAvgM


def test_two_rounds_by_hand() -> None:
    """One number, one client, one step a round: g = 2 and then 4, η = 0.1, no decay, β = 0.5.

    Round 1: Δ = −0.2, m = −0.2, θ = 1 − 0.2 = 0.8.
        Round 2: Δ = −0.4, m = −0.1 − 0.4 = −0.5, θ = 0.3.
    """
    algorithm = DPFedAvgM(lr=0.1, weight_decay=0.0, beta=0.5)
    theta = torch.ones(1, dtype=torch.float64)
    path = run_rounds(
        algorithm, make_space(1), tables([[[[2.0]]], [[[4.0]]]]), 2, 1, theta=theta
    ).path()
    assert path.flatten().tolist() == pytest.approx([1.0, 0.8, 0.3])


def test_without_momentum_it_is_dp_fedavg() -> None:
    def end(algorithm: object) -> torch.Tensor:
        oracle = noisy(curved(6), seed=11)
        return run_rounds(
            algorithm, make_space(2, 4), oracle, 4, 3, 2, theta=start_point(6), phi=0.25
        ).theta  # type: ignore[arg-type]

    plain = end(DPFedAvg(lr=0.05, weight_decay=0.01))
    assert torch.equal(end(DPFedAvgM(lr=0.05, weight_decay=0.01, beta=0.0)), plain)
    assert not torch.equal(end(DPFedAvgM(lr=0.05, weight_decay=0.01, beta=0.5)), plain)


def test_the_oracle_is_called_as_declared() -> None:
    """The ledger charges from `releases`: what a step takes must be what it declares."""
    algorithm = DPFedAvgM()
    history = run_rounds(
        algorithm, make_space(2, 4), noisy(curved(6)), 2, 3, 2, theta=start_point(6), phi=0.01
    )
    assert [oracle.calls for oracle in history.oracles] == [3 * algorithm.releases.batches] * 2


def test_a_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfed.config import load
    from dpfed.registry import registry
    from dpfed.training.run import run

    monkeypatch.setitem(REGISTRY, DPFedAvgM.name, DPFedAvgM)
    keys = [
        "algorithm.name=dp-fedavgm",
        "model.name=linear",
        "run.rounds=3",
        "algorithm.beta=0.5",
        "algorithm.lr=0.3",
    ]
    result = run(load("digits", keys, registry()), tmp_path / "run")
    assert result["test_accuracy"] > result["start_accuracy"] + 0.2
    assert 0 < result["epsilon"]["server_worst"] <= 8

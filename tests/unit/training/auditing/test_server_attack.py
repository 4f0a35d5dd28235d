"""The attack finds broken isolation, and moves an exact sum by one unit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import dpfed
from torch import Tensor, nn

from dpfed.api.configuring import prepared
from dpfed.config import build
from dpfed.data.partition import shards_of
from dpfed.errors import DpfedError
from dpfed.model.given_module import given_module
from dpfed.privacy.sampling import DrawnBatch
from dpfed.registry import registry
from dpfed.training.auditing import server_attack
from dpfed.training.auditing.server_attack import (
    LARGEST,
    SLACK,
    AttackedOracle,
    ServerAttack,
    _candidate,
    attack_server,
)
from dpfed.training.job.job import Job, prepare

CONFIG: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "clients": 30},
    "model": {"name": "linear"},
    "algorithm": {"name": "dp-fedavg", "lr": 0.1},
    "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 16, "isolation": "exact"},
    "run": {"rounds": 1, "local_steps": 1, "participation": 1.0, "device": "cpu"},
}


def job_of(**sections: dict[str, Any]) -> Job:
    raw = {name: {**table, **sections.get(name, {})} for name, table in CONFIG.items()}
    return prepare(build(raw, registry()))


@pytest.mark.parametrize("grid", [True, False])
def test_an_exact_sum_moves_by_one_unit_at_most(grid: bool) -> None:
    job = job_of(privacy={"grid": grid})
    found = attack_server(job, 0.5)
    assert 0.5 < found.moved <= 1 + SLACK
    assert not found.broken
    assert found.thetas > 1
    assert (found.isolation, found.places) == ("exact", job.model.places)
    assert found.places > 1


def test_units_of_several_records_and_dropout_keep_their_draws() -> None:
    job = job_of(model={"name": "glyph-vit", "train": "lora", "lora": {"dropout": 0.2}})
    rows = len(job.private.records.labels)
    owner = np.arange(rows) % 30
    job = dataclasses.replace(
        job,
        private=dataclasses.replace(
            job.private, shards=shards_of(owner, 30, np.arange(rows) // 90)
        ),
    )
    found = attack_server(job, 0.5)
    assert found.units == 16
    assert not found.broken


class ByOrder(AttackedOracle):
    """A broken build: places follow from the order of the records, and a place rounds."""

    def sum_before_noise(self, theta: Tensor, batch: DrawnBatch) -> Tensor:
        total = super().sum_before_noise(theta, batch)
        return total + 1e-3 * (np.arange(len(batch.owner)) % 7).sum()


class KeepsEveryone(AttackedOracle):
    """A broken build: the clip norm is twice as large as stated."""

    def sum_before_noise(self, theta: Tensor, batch: DrawnBatch) -> Tensor:
        return 2 * super().sum_before_noise(theta, batch)


@pytest.mark.parametrize("oracle", [ByOrder, KeepsEveryone])
def test_a_broken_build_is_disproved(oracle: type[AttackedOracle]) -> None:
    found = attack_server(job_of(), 0.5, oracle)
    assert found.moved > 1 + SLACK
    assert found.broken


def test_only_exact_isolation_can_be_disproved() -> None:
    assert not ServerAttack("fast", 1, 5.0, 3, 48).broken
    assert ServerAttack("exact", 8, 1.00001, 3, 48).broken
    assert ServerAttack("exact", 8, float("nan"), 3, 48).broken
    assert not ServerAttack("exact", 8, 1.0000001, 3, 48).broken


def test_candidates_are_bounded_and_change_a_part_of_the_best() -> None:
    generator = torch.Generator().manual_seed(0)
    start, best = torch.zeros(1000), torch.full((1000,), 5.0)
    best[0] = 7.0
    shares = []
    for _ in range(200):
        theta = _candidate(start, best, generator)
        assert float(theta.abs().max()) <= LARGEST
        shares.append(float((theta == best).float().mean()))
    assert 0.3 < np.mean(np.array(shares) > 0) < 0.7
    assert max(shares) > 0.9


def test_settings_without_anything_to_attack_are_refused() -> None:
    job = job_of()
    with pytest.raises(DpfedError, match="--seconds 0 is not allowed"):
        attack_server(job, 0.0)
    with pytest.raises(DpfedError, match="needs records of a client"):
        attack_server(dataclasses.replace(job, served=True), 1.0)


def test_the_command_prints_the_largest_movement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\nname = "digits"\n[model]\nname = "linear"\n[privacy]\nbatch = 8\nsigma = 1.0\n'
    )
    words = ["audit", str(config), "--server", "--seconds", "0.2", "--json"]
    exact = [*words, "--set", "privacy.isolation=exact"]
    assert dpfed(*exact) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["isolation"] == "exact"
    assert 0 < found["moved"] <= 1 + SLACK
    assert found["disproved"] is False
    monkeypatch.setattr(
        "dpfed.training.auditing.server_attack.attack_server",
        lambda *_: ServerAttack("exact", 8, 2.5, 3, 48),
    )
    assert dpfed(*exact) == 4
    assert "DISPROVED" in capsys.readouterr().out


def logits_that_round_differently() -> tuple[float, float]:
    """Return two numbers with equal sigmoids in long vectors, but not in short ones.

    Kernels compute the last numbers of a tensor one by one. The result can differ in its last bit.
    """
    x = torch.linspace(9, 12, 400_000)
    in_vectors = x.sigmoid()
    alone = torch.cat([part.clone().sigmoid() for part in x.split(7)])
    same = in_vectors == alone
    for i in (~same).nonzero().flatten().tolist():
        partners = ((in_vectors == in_vectors[i]) & same).nonzero().flatten()
        if len(partners):
            return float(x[i]), float(x[int(partners[0])])
    pytest.skip("this machine computes sigmoids of long and short vectors alike")


def test_rare_differences_of_kernels_do_not_break_an_exact_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The theta makes two scores of every record cancel, except where a kernel rounds otherwise."""
    units = 500
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1200, 6)).astype(np.float32)
    y = (rng.random((1200, 3)) < 0.5).astype(int)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    settings = {"privacy.isolation": "exact", "run.seed": 23}
    given = {"task": "multilabel", "clients": 2, "settings": settings}
    source, config = prepared(model, (x, y), (x[:50], y[:50]), given)
    with given_module(model):
        job = prepare(config, source)
    one, other = logits_that_round_differently()
    row = 1024.0 * torch.tensor([1.0, -1.0] * 8)
    parts = {
        "0.weight": torch.zeros(16, 6),
        "0.bias": torch.full((16,), 2.0**-20),
        "2.weight": torch.stack([row, -row, torch.zeros(16)]),
        "2.bias": torch.tensor([one, other, 12.0]),
    }
    named = [next(v for k, v in parts.items() if name.endswith(k)) for name in job.space.names]
    monkeypatch.setattr(server_attack, "MAX_UNITS", units)
    rows, _ = job.private.shards.slots(0, np.arange(units))
    features = torch.zeros(units, 6)
    features[::72, 0] = 1e3
    features[64::72, 0] = -1e3
    records = job.private.records
    records.inputs[next(iter(records.inputs))][torch.from_numpy(rows)] = features
    records.labels[torch.from_numpy(rows)] = 1
    target = server_attack._Target(job, AttackedOracle)
    assert target.movement(torch.cat([part.flatten() for part in named])) <= 1 + SLACK

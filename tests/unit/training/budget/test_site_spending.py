"""Sums over the ledgers of one site: composed exactly, and refused where they cannot be added."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import norm

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.registry import registry
from dpfed.training.budget.ledgers import client_ledger
from dpfed.training.budget.site_spending import read_site_spending
from dpfed.training.run import run

KEYS = [
    "model.name=linear",
    "data.clients=4",
    "data.partition=iid",
    "run.rounds=2",
    "run.local_steps=2",
    "run.participation=1",
    "run.checkpoint_every=0",
    "run.noise=os",
]


def site(
    folder: Path,
    sigma: float,
    steps: int,
    unit: str = "record",
    sampling: Sampling = "poisson",
    **more: Any,
) -> Path:
    """Write a client's state folder with one charge of `steps` steps at rate 1."""
    folder.mkdir()
    with client_ledger(folder, "clinic", more.get("delta", 1e-5), unit, False) as ledger:
        if steps:
            rate = 1.0 if sampling == "poisson" else 0.1
            mechanism = Mechanism(sampling, rate, sigma)
            ledger.charge([Charge("clinic", 1, steps, mechanism, "os")], run="first")
    return folder


def gaussian_delta(mu: float, epsilon: float) -> float:
    below = norm.cdf(mu / 2 - epsilon / mu)
    return float(below - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def test_two_ledgers_compose_like_one_gaussian(tmp_path: Path) -> None:
    """By hand: 9 steps of sigma 3 and 16 of sigma 4 are one Gaussian of mu = sqrt(1 + 1)."""
    folders = [site(tmp_path / "a", 3.0, 9), site(tmp_path / "b", 4.0, 16)]
    found = read_site_spending(folders)
    assert gaussian_delta(math.sqrt(2), found.epsilon) <= 1e-5
    assert gaussian_delta(math.sqrt(2), found.epsilon * 0.995) > 1e-5
    assert found.epsilon < sum(ledger.epsilon for ledger in found.ledgers)
    assert found.epsilon > max(ledger.epsilon for ledger in found.ledgers)
    assert (found.unit, found.adjacency) == ("record", "add/remove one")


def test_the_smallest_delta_counts(tmp_path: Path) -> None:
    folders = [site(tmp_path / "a", 3.0, 9), site(tmp_path / "b", 3.0, 0, delta=1e-7)]
    found = read_site_spending(folders)
    assert found.delta == 1e-7
    assert found.epsilon > found.ledgers[0].epsilon
    assert found.ledgers[1].epsilon == 0


def test_a_run_counts_with_its_busiest_client(tmp_path: Path) -> None:
    keys = [*KEYS, "privacy.rate=1", "privacy.sigma=2"]
    run(load("digits", keys, registry()), tmp_path / "run")
    both = read_site_spending([tmp_path / "run", site(tmp_path / "a", 1.0, 3)])
    # By hand: sqrt(4) / 2 = 1 of the run and sqrt(3) of the client make mu = 2.
    assert gaussian_delta(2.0, both.epsilon) <= 1e-5
    assert gaussian_delta(2.0, both.epsilon * 0.995) > 1e-5
    assert not both.ledgers[0].seeded


def test_a_run_that_ends_early_counts_as_planned(tmp_path: Path) -> None:
    """The moment of the end depends on results, so fewer rounds would be no guarantee."""
    early = ["run.rounds=9", "run.early_stopping=1", "privacy.rate=1", "privacy.sigma=60"]
    result = run(load("digits", [*KEYS, *early], registry()), tmp_path / "run")
    assert result["rounds"] < 9
    found = read_site_spending([tmp_path / "run"])
    # By hand: 9 rounds of 2 steps of sigma 60.
    assert gaussian_delta(math.sqrt(18) / 60, found.epsilon) <= 1e-5
    assert gaussian_delta(math.sqrt(18) / 60, found.epsilon * 0.99) > 1e-5


def test_seeded_noise_is_told(tmp_path: Path) -> None:
    keys = [*KEYS, "privacy.rate=1", "privacy.sigma=2", "run.noise=seeded"]
    run(load("digits", keys, registry()), tmp_path / "run")
    assert read_site_spending([tmp_path / "run"]).ledgers[0].seeded


def test_ledgers_that_cannot_be_added_are_refused_by_name(tmp_path: Path) -> None:
    record = site(tmp_path / "record", 3.0, 1)
    patient = site(tmp_path / "patient", 3.0, 1, unit="patient")
    fixed = site(tmp_path / "fixed", 3.0, 1, sampling="fixed_wor")
    with pytest.raises(DpfedError, match=r"record protects one record and .*one patient"):
        read_site_spending([record, patient])
    with pytest.raises(DpfedError, match=r"'add/remove one' and .*fixed under 'replace one'"):
        read_site_spending([record, fixed])
    shutil.copytree(record, tmp_path / "copy")
    with pytest.raises(DpfedError, match="hold the same ledger"):
        read_site_spending([record, tmp_path / "copy"])
    with pytest.raises(DpfedError, match="hold the same ledger"):
        read_site_spending([record, record])
    with pytest.raises(DpfedError, match="has no ledger"):
        read_site_spending([tmp_path])


def test_an_older_ledger_without_a_unit_stands_alone(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    Ledger.create(old / "ledger.db", client="clinic", delta=1e-5).close()
    assert read_site_spending([old]).unit == "not stated"
    with pytest.raises(DpfedError, match=r"old does not state its protected unit"):
        read_site_spending([site(tmp_path / "a", 1.0, 1), old])


def test_runs_without_a_ledger_are_refused(tmp_path: Path) -> None:
    run(load("digits", [*KEYS, "privacy.enabled=false"], registry()), tmp_path / "open")
    with pytest.raises(DpfedError, match="run without privacy"):
        read_site_spending([tmp_path / "open"])

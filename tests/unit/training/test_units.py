"""A user's own data: clients from a column, and patients instead of records as units."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpfed.config import load
from dpfed.registry import registry
from dpfed.report.page import read_report, render
from dpfed.training.job.job import prepare
from dpfed.training.run import run


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """Write records of three hospitals; each has 20 patients with 1 to 3 records."""
    rng = np.random.default_rng(0)
    rows, labels, hospitals, patients = [], [], [], []
    for h in range(3):
        for p in range(20):
            for _ in range(int(rng.integers(1, 4))):
                label = int(rng.integers(2))
                rows.append(rng.normal(size=5) + 2 * label)
                labels.append(label)
                hospitals.append(f"hospital-{h}")
                patients.append(f"patient-{h}-{p}")
    path = tmp_path / "records.npz"
    x, y = np.array(rows, dtype=np.float32), np.array(labels)
    np.savez(
        path,
        x_train=x,
        y_train=y,
        x_test=x,
        y_test=y,
        train_hospital=hospitals,
        train_patient=patients,
    )
    return path


def settings(hospital: Path, *more: str) -> list[str]:
    common = [
        "data.name=npz",
        f"data.path={hospital}",
        "data.partition=natural",
        "data.client_column=hospital",
        "model.name=linear",
        "model.train=full",
        "privacy.rate=0.25",
        "privacy.sigma=1.0",
        "run.rounds=3",
        "run.local_steps=2",
    ]
    return [*common, *more]


def test_clients_are_the_values_of_a_column(hospital: Path) -> None:
    job = prepare(load("digits", settings(hospital), registry()))
    assert len(job.private.shards) == 3
    owners = np.load(hospital)["train_hospital"]
    for client in range(3):
        assert {owners[i] for i in job.private.shards.of(client)} == {f"hospital-{client}"}


def test_natural_clients_keep_their_names(hospital: Path, tmp_path: Path) -> None:
    names = ["hospital-0", "hospital-1", "hospital-2"]
    config = load("digits", settings(hospital, "data.clients=7"), registry())
    job = prepare(config)
    assert list(job.private.shards.names) == names
    said = (
        "the clients are the 3 of data.client_column = 'hospital': hospital-0, hospital-1, "
        "hospital-2; data.clients = 7 has no effect"
    )
    assert said in job.notes
    result = run(config, tmp_path / "run")
    assert result["client_names"] == names
    assert said in result["notes"]
    figures = {figure.id: figure for figure in read_report([tmp_path / "run"]).figures}
    assert [row[1] for row in figures["clients"].rows] == names
    assert [row[0] for row in figures["labels"].rows] == names
    assert "hospital-1" not in render(read_report([tmp_path / "run"], public=True))


def test_a_patient_is_protected_as_a_whole(hospital: Path, tmp_path: Path) -> None:
    config = load("digits", settings(hospital, "data.unit_column=patient"), registry())
    job = prepare(config)
    assert job.private.shards.sizes.tolist() == [20, 20, 20]
    assert job.plan.unit == "patient"
    patients = np.load(hospital)["train_patient"]
    rows, counts = job.private.shards.slots(1, np.array([3, 7]))
    assert len(set(patients[rows])) == 2
    assert counts.sum() == len(rows)
    result = run(config, tmp_path / "r")
    assert "one patient of one client" in result["guarantee"]
    assert json.loads((tmp_path / "r" / "run.json").read_text())["guarantee"] == result["guarantee"]


def test_a_missing_column_is_refused(hospital: Path) -> None:
    from dpfed.errors import DpfedError

    with pytest.raises(DpfedError, match=r"no column 'ward'.*hospital, patient"):
        prepare(load("digits", settings(hospital, "data.unit_column=ward"), registry()))

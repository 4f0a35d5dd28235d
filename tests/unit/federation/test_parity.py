"""In test mode a federation gives the numbers of a simulation with the same configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from federation_case import client_of, federated, federation_of, job_of, rows_of, simulated

from dpfed.errors import DpfedError
from dpfed.privacy.ledger.ledger import Ledger

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "dp-fedadamw": {},
    "dp-scaffold": {"algorithm": {"name": "dp-scaffold", "lr": 0.1}},
    "dp-fedavg, quantile": {
        "algorithm": {"name": "dp-fedavg", "lr": 0.1},
        "privacy": {"clip_mode": "quantile"},
    },
    "dp-fafed, vr": {"algorithm": {"name": "dp-fafed", "lr": 3e-3, "fafed_vr": True}},
    "dp-fedadamw, grid in both": {"privacy": {"grid": True}},
    "dp-fedadamw, exact in both": {"privacy": {"grid": True, "isolation": "exact"}},
    "dp-fedadamw, an average of two views": {
        "data": {"augment": "flip", "views": 2},
        "run": {"average": 0.5},
    },
    "dp-fedadamw, two of three": {"run": {"participation": 0.67}},
    "dp-scaffold, two of three": {
        "algorithm": {"name": "dp-scaffold", "lr": 0.1},
        "run": {"participation": 0.67},
    },
    "dp-fedadamw, int8 both ways": {"federation": {"upload": "int8", "download": "int8"}},
    "dp-fedadamw, bf16 both ways": {"federation": {"upload": "bf16", "download": "bf16"}},
    "dp-scaffold, int8 up": {
        "algorithm": {"name": "dp-scaffold", "lr": 0.1},
        "federation": {"upload": "int8"},
    },
    "dp-fedavg, weights by size": {
        "algorithm": {"name": "dp-fedavg", "lr": 0.1, "agg_weights": "size"}
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_federation_in_test_mode_takes_the_simulations_way(case: str, tmp_path: Path) -> None:
    job = job_of(**CASES[case])
    expected, rounds = simulated(job)
    federation, _, log = federation_of(job, tmp_path, seeded=True)
    found, seen = federated(job, federation)
    assert log == []
    assert float((expected - job.theta).norm()) > 1e-3
    difference = (found - expected).abs()
    if "federation" in CASES[case]:
        # A last bit of a number may change its rounding by a step.
        assert float(difference.median()) < 1e-5
        assert float(difference.max()) < 1e-3
        exact, _ = simulated(job_of(**{**CASES[case], "federation": {}}))
        assert float((expected - exact).abs().max()) > 1e-5
    else:
        assert float(difference.max()) < 1e-5
    assert [round.clip for round in seen] == pytest.approx(
        [round.clip for round in rounds], rel=1e-5
    )
    if "quantile" in case:
        assert len({round.clip for round in seen}) > 1
    rows = rows_of(tmp_path)
    assert rows
    assert all(row.charge.void and row.charge.noise == "seeded" for row in rows)
    with Ledger.open(tmp_path / "clinic-0" / "ledger.db", readonly=True) as ledger:
        assert ledger.history("clinic-0") == []


def test_a_client_says_at_once_that_its_views_would_all_be_the_same(tmp_path: Path) -> None:
    job = job_of()
    data = dataclasses.replace(job.config.data, augment="none", views=2)
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, data=data))
    with pytest.raises(DpfedError, match=r"data\.views = 2 needs views that differ"):
        client_of(job, 0, tmp_path)


def test_real_noise_is_never_the_simulations(tmp_path: Path) -> None:
    job = job_of()
    expected, _ = simulated(job)
    found, _ = federated(job, federation_of(job, tmp_path)[0])
    assert float((found - expected).abs().max()) > 1e-3
    with Ledger.open(
        tmp_path / "clinic-1" / "ledger.db", client="clinic-1", readonly=True
    ) as ledger:
        assert ledger.history("clinic-1") == [(job.plan.mechanism(1), 6)]
        assert ledger.verify().rows == 3


def test_the_grid_moves_a_run_by_its_rounding_and_no_more() -> None:
    off, _ = simulated(job_of(privacy={"grid": False}))
    on, _ = simulated(job_of(privacy={"grid": True}))
    auto, _ = simulated(job_of())
    assert 0 < float((on - off).abs().max()) < 1e-5
    assert float((auto - off).abs().max()) == 0, "auto means off in simulations"

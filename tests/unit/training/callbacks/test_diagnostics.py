"""Diagnostics equal a loop over the clients, and exist only in runs without real noise."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpfed.config import Config, build
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.callbacks.diagnostics import BINS, DECADES, Diagnostics, read_diagnostics
from dpfed.training.job.job import Job, prepare
from dpfed.training.local_steps import LocalResult
from dpfed.training.round_context import context, first_state
from dpfed.training.run import run

CLIENTS = 6


def features(width: int = 4, zero: bool = False) -> Source:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, width)).astype(np.float32)
    y = (x @ rng.normal(size=(width, 3))).argmax(1)
    x *= not zero
    train = Table({"features": x[:120]}, y[:120])
    return Source(train, Table({"features": x[120:]}, y[120:]), ("a", "b", "c"), "features")


def config_of(**sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "data": {"clients": CLIENTS, "partition": "iid"},
        "model": {"name": "linear", "liveness": sections.get("run", {}).get("noise") == "os"},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.05},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {
            "rounds": 3,
            "local_steps": 3,
            "participation": 1.0,
            "diagnostics": True,
            "device": "cpu",
        },
    }
    return build(
        {name: {**table, **sections.get(name, {})} for name, table in raw.items()}, registry()
    )


def result_of(states: Any) -> LocalResult:
    return LocalResult(states, {}, {})


def clients_of(job: Job) -> list[Any]:
    """Return each client's state after round 1, computed one client at a time."""
    seen: list[Any] = []

    def watch(ctx: Any, clients: Sequence[int], result: LocalResult) -> None:
        seen.append(result.states)

    fleet = Fleet(job, watch=watch)
    for i in range(CLIENTS):
        fleet.run_cohort(1, first_state(job), [i])
    return seen


@pytest.mark.parametrize("algorithm", ["dp-fedadamw", "dp-local-adamw", "dp-fedavg"])
@pytest.mark.parametrize("size", [1, 4, "auto"])
def test_values_equal_a_loop_over_the_clients(
    algorithm: str, size: int | str, tmp_path: Path
) -> None:
    config = config_of(algorithm={"name": algorithm}, run={"fleet_size": size})
    job = prepare(config, features())
    diagnostics = Diagnostics(tmp_path, job)
    Fleet(job, watch=diagnostics.watch).run_cohort(1, first_state(job), range(CLIENTS))
    diagnostics.on_round(SimpleNamespace(t=1))
    (row,) = read_diagnostics(tmp_path)
    each = clients_of(job)
    thetas = np.stack([local.theta[0].double().numpy() for local in each])
    drift = math.sqrt(
        sum(float(np.sum((theta - thetas.mean(0)) ** 2)) for theta in thetas) / CLIENTS
    )
    assert row["drift"] == pytest.approx(drift, rel=1e-4)
    assert row["clients"] == CLIENTS
    assert row["noise_std"] == pytest.approx(1.0 * 0.5 / 8)
    if algorithm == "dp-fedavg":
        assert not {"v_mean", "sqrt_v_histogram", "abs_m_histogram"} & set(row)
        return
    v = np.stack([local.v_hat[0].double().numpy() for local in each])
    variance = [
        float(np.mean([(one - two) ** 2 for one in column for two in column])) / 2 for column in v.T
    ]
    assert row["v_mean"] == pytest.approx(v.mean(), rel=1e-5)
    assert row["v_variance"] == pytest.approx(np.mean(variance), rel=1e-4)
    assert row["v_relative_variance"] == pytest.approx(
        np.mean(variance) / np.mean(v.mean(0) ** 2), rel=1e-4
    )
    width = (DECADES[1] - DECADES[0]) / BINS
    for name, values in (
        ("sqrt_v", np.sqrt(v)),
        ("abs_m", np.abs(np.stack([local.m[0].numpy() for local in each]))),
    ):
        wanted = np.zeros(BINS, dtype=int)
        for value in values.flatten():
            wanted[int((math.log10(max(value, 1e-9)) - DECADES[0]) / width)] += 1
        found = np.array(row[f"{name}_histogram"])
        assert found.sum() == values.size
        # Rounding may move values at the edge of a bin.
        assert np.abs(found - wanted).sum() <= 4


def test_the_noise_of_unequal_clients_does_not_depend_on_the_fleet(tmp_path: Path) -> None:
    found = []
    for size in (1, 2, "auto"):
        config = config_of(
            data={"partition": "dirichlet_classwise", "alpha": 5.0},
            algorithm={"name": "dp-local-adamw"},
            privacy={"batch": 4},
            run={"fleet_size": size},
        )
        job = prepare(config, features())
        assert not job.plan.equal_phi
        folder = tmp_path / str(size)
        folder.mkdir()
        diagnostics = Diagnostics(folder, job)
        Fleet(job, watch=diagnostics.watch).run_cohort(1, first_state(job), range(CLIENTS))
        diagnostics.on_round(SimpleNamespace(t=1))
        found.append(read_diagnostics(folder)[0]["noise_std"])
        assert found[-1] == pytest.approx(
            math.sqrt(np.mean([job.plan.phi(i) for i in range(CLIENTS)]))
        )
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)


def test_with_noise_alone_the_root_of_v_is_the_noise_std(tmp_path: Path) -> None:
    """The records are zeros, and the clipped gradient of the bias is far below the noise."""
    config = config_of(privacy={"sigma": 50.0}, run={"local_steps": 30})
    run(config, tmp_path / "r", source=features(40, zero=True))
    for row in read_diagnostics(tmp_path / "r"):
        assert row["noise_std"] == pytest.approx(50 * 0.5 / 8)
        assert math.sqrt(row["v_mean"]) == pytest.approx(row["noise_std"], rel=0.05)
        counts = np.array(row["sqrt_v_histogram"])
        middle = (
            DECADES[0] + (np.searchsorted(np.cumsum(counts), counts.sum() / 2) + 0.5) * 10 / BINS
        )
        assert middle == pytest.approx(math.log10(row["noise_std"]), abs=0.1)


def test_each_round_has_one_line_if_diagnostics_are_on(tmp_path: Path) -> None:
    run(config_of(run={"rounds": 7}), tmp_path / "r", source=features())
    rows = read_diagnostics(tmp_path / "r")
    assert [row["round"] for row in rows] == list(range(1, 8))
    assert all("not private" in row["release"] for row in rows)
    assert [row["round"] for row in rows if "sqrt_v_histogram" in row] == [1, 3, 4, 5, 7]
    run(config_of(run={"diagnostics": False}), tmp_path / "off", source=features())
    assert not (tmp_path / "off" / "diagnostics.jsonl").exists()
    assert read_diagnostics(tmp_path / "off") == []


def test_diagnostics_with_real_noise_are_refused_before_any_file(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"run\.diagnostics"):
        run(config_of(run={"noise": "os"}), tmp_path / "r", source=features())
    assert not (tmp_path / "r").exists()
    run(
        config_of(run={"noise": "os", "diagnostics": False, "rounds": 1}),
        tmp_path / "r",
        source=features(),
    )


def test_diagnostics_do_not_change_the_run(tmp_path: Path) -> None:
    results = [
        run(config_of(run={"diagnostics": on}), tmp_path / str(on), source=features())
        for on in (True, False)
    ]
    models = [(tmp_path / str(on) / "model.safetensors").read_bytes() for on in (True, False)]
    assert models[0] == models[1]
    assert results[0]["epsilon"] == results[1]["epsilon"]


def test_values_off_the_scale_are_in_the_outer_bins_and_nan_is_null(tmp_path: Path) -> None:
    job = prepare(config_of(), features())
    local = clients_of(job)[0]
    v = torch.full_like(local.v_hat, 1e6)
    v[0, 0] = 0.0
    diagnostics = Diagnostics(tmp_path, job)
    diagnostics.watch(context(job, 1, [0]), [0], result_of(dataclasses.replace(local, v_hat=v)))
    diagnostics.on_round(SimpleNamespace(t=1))
    local = dataclasses.replace(local, theta=local.theta * math.nan)
    diagnostics.watch(context(job, 2, [0]), [0], result_of(local))
    diagnostics.on_round(SimpleNamespace(t=2))
    lines = (tmp_path / "diagnostics.jsonl").read_text().splitlines()
    first, second = (
        json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in lines
    )
    assert (first["sqrt_v_histogram"][0], first["sqrt_v_histogram"][-1]) == (1, v.numel() - 1)
    assert second["drift"] is None


def test_a_repeated_round_is_read_from_its_last_line(tmp_path: Path) -> None:
    lines = [
        '{"round": 1, "drift": 1}',
        '{"round": 2, "drift": 5}',
        '{"round": 2, "drift": 2}',
        '{"round": 3, "dr',
    ]
    (tmp_path / "diagnostics.jsonl").write_text("\n".join(lines))
    assert [(row["round"], row["drift"]) for row in read_diagnostics(tmp_path)] == [(1, 1), (2, 2)]

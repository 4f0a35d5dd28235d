"""Trackers get public figures only, are refused if missing, and are left out if they fail."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report_case import make_run

from dpfed.errors import DpfedError
from dpfed.training.callbacks import trackers

FEW = ("run.rounds=2", "run.diagnostics=false")


class Spy:
    """A tracker that records its calls."""

    calls: list[tuple[str, Any]]

    def __init__(self, folder: Path) -> None:
        self.calls = []
        Spy.last = self  # type: ignore[attr-defined]

    def start(self, settings: Mapping[str, Any]) -> None:
        self.calls.append(("start", dict(settings)))

    def log(self, t: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", (t, dict(metrics))))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.KINDS, "wandb", (Spy, "json"))


@pytest.mark.usefixtures("spied")
def test_a_tracker_gets_only_public_figures(tmp_path: Path) -> None:
    make_run(tmp_path / "r", "dp-fedavg", 987654321, *FEW, 'run.trackers=["wandb"]')
    calls = Spy.last.calls  # type: ignore[attr-defined]
    assert [kind for kind, _ in calls] == ["start", "log", "log", "log", "log", "finish"]
    settings = calls[0][1]
    assert settings["algorithm.name"] == '"dp-fedavg"'
    assert "run.seed" not in settings
    assert "987654321" not in str(calls)
    logged = [what for kind, what in calls if kind == "log"]
    assert [t for t, _ in logged] == [0, 1, 2, 2]
    assert set(logged[1][1]) == {"accuracy", "loss", "clip", "epsilon_planned"}
    assert set(logged[3][1]) == {"epsilon_server_worst", "epsilon_third_party"}
    assert logged[3][1]["epsilon_server_worst"] == pytest.approx(logged[2][1]["epsilon_planned"])


@pytest.mark.parametrize("broken", ["start", "log", "finish"])
@pytest.mark.usefixtures("spied")
def test_a_failing_tracker_is_reported_once_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("no route to\nthe service")

    monkeypatch.setattr(Spy, broken, fail)
    make_run(tmp_path / "r", "dp-fedavg", 0, *FEW, 'run.trackers=["wandb"]')
    assert (
        capsys.readouterr().err.count(
            "the tracker wandb failed and is left out from here on: no route to the"
        )
        == 1
    )
    assert (tmp_path / "r" / "model.safetensors").exists()


def test_a_missing_package_is_reported_before_any_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.KINDS, "mlflow", (Spy, "there_is_no_such_package"))
    with pytest.raises(DpfedError, match=r"pip install 'dpfed\[mlflow\]'"):
        make_run(tmp_path / "r", "dp-fedavg", 0, *FEW, 'run.trackers=["mlflow"]')
    assert not (tmp_path / "r").exists()


@pytest.mark.usefixtures("spied")
def test_wandb_publishes_times_and_is_refused_with_real_noise(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="wandb stores when each round ended"):
        make_run(tmp_path / "r", "dp-fedavg", 1, *FEW, 'run.trackers=["wandb"]', 'run.noise="os"')


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DpfedError, match=r"run.trackers = .* must be one of 'tensorboard', 'mlflow', 'wandb'"
    ):
        make_run(tmp_path / "r", "dp-fedavg", 0, 'run.trackers=["neptune"]')


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    make_run(tmp_path / "r", "dp-fedavg", 0, *FEW, 'run.trackers=["tensorboard"]')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert {"accuracy", "loss", "epsilon_planned", "epsilon_third_party"} <= set(
        events.Tags()["scalars"]
    )
    assert [e.step for e in events.Scalars("accuracy")] == [0, 1, 2]
    # Times of rounds are private, so the event times are the round numbers.
    assert [e.wall_time for e in events.Scalars("accuracy")] == [0, 1, 2]


def test_mlflow_stores_a_run_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    make_run(tmp_path / "r", "dp-fedavg", 0, *FEW, 'run.trackers=["mlflow"]')
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "r" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("dpfed")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.data.params["algorithm.name"] == '"dp-fedavg"'
    assert [m.step for m in client.get_metric_history(kept.info.run_id, "accuracy")] == [0, 1, 2]
    assert kept.info.status == "FINISHED"


def test_wandb_works_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    make_run(tmp_path / "r", "dp-fedavg", 987654321, *FEW, 'run.trackers=["wandb"]')
    assert "failed" not in capsys.readouterr().err
    (stored,) = (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    # Another process writes the file.
    for _ in range(100):
        if stored.stat().st_size > 500:
            break
        time.sleep(0.1)
    content = stored.read_bytes()
    assert b"epsilon_planned" in content
    assert b"987654321" not in content

"""Experiment trackers of the setting `run.trackers`: TensorBoard, MLflow and Weights & Biases.

A tracker gets three calls: `start(settings)` with the first round, `log(round, metrics)` and
`finish()`. It receives only values that may be published (see `public_figures`): no seed, no
list of the clients in a round, nothing about single clients. Nothing leaves the machine by default.
MLflow writes into the run's folder unless MLFLOW_TRACKING_URI is set. Weights & Biases works
offline unless WANDB_MODE is set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dpfed.config import Config, to_dict
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.training.callbacks.base import Callback
from dpfed.training.callbacks.public_figures import FIGURES, flat, public_metrics, public_settings
from dpfed.training.rounds import Round

Settings = Mapping[str, Any]


class Tracker(Protocol):
    """An experiment tracker: a program that stores the settings and the metrics of runs."""

    def start(self, settings: Settings) -> None: ...
    def log(self, t: int, metrics: Mapping[str, float]) -> None: ...
    def finish(self) -> None: ...


class TensorBoard:
    """Tracker that writes event files to the folder `tensorboard` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"

    def start(self, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run may log a round again. TensorBoard then draws the new value in place of the
        # old one.
        self._writer: Any = SummaryWriter(str(self._folder))
        text = "\n".join(f"    {key} = {value}" for key, value in settings.items())
        self._writer.add_text("configuration", text)

    def log(self, t: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # Log the number of the round in place of the time, because real times depend on private
            # batches.
            self._writer.add_scalar(name, value, t, walltime=float(t))
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Mlflow:
    """Tracker that logs to the store of MLFLOW_TRACKING_URI, or to `mlruns` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._store = (
            os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        )

    def start(self, settings: Settings) -> None:
        if self._store.startswith("file:"):
            # Without this variable, newer versions of MLflow refuse to store runs in files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._store)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dpfed")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:500])

    def log(self, t: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=t, timestamp=t)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


class Wandb:
    """Tracker that writes to `wandb` in the run's folder. It records nothing about the machine.

    It sends nothing over the network unless WANDB_MODE is set.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, settings: Settings) -> None:
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        project = os.environ.get("WANDB_PROJECT", "dpfed")
        self._run = wandb.init(
            project=project, dir=str(self._folder), mode=mode, config=dict(settings), settings=quiet
        )

    def log(self, t: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=t)

    def finish(self) -> None:
        self._run.finish()


KINDS: dict[str, tuple[Callable[[Path], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (Mlflow, "mlflow"),
    "wandb": (Wandb, "wandb"),
}


def refuse_missing(config: Config) -> None:
    """Raise DpfedError if a tracker of `run.trackers` is not installed, or not allowed.

    Weights & Biases is not allowed with secret noise (`run.noise = "os"`), because it stores the
    times of rounds.
    """
    for name in config.run.trackers:
        if importlib.util.find_spec(KINDS[name][1]) is None:
            raise DpfedError(
                f"run.trackers names {name}, which is not installed: "
                f"pip install 'dpfed[{name}]', or leave it out"
            )
        if name == "wandb" and config.run.noise == "os":
            raise DpfedError(
                "wandb stores when each round ended, which depends on private batches: "
                'with run.noise = "os" take tensorboard or mlflow'
            )


class Trackers(Callback):
    """Callback that calls all experiment trackers of a run.

    A tracker that raises an error is reported once and not called again; the run continues.
    """

    def __init__(self, config: Config, folder: Path, planned: Planned | None) -> None:
        self._config = config
        self._planned = planned
        self._started = False
        self._live = {name: KINDS[name][0](folder) for name in dict.fromkeys(config.run.trackers)}

    def on_round(self, round: Round) -> None:
        if not self._started:
            settings = flat(public_settings(to_dict(self._config)))
            shown = {key: json.dumps(value) for key, value in settings.items()}
            self._each(lambda tracker: tracker.start(shown))
            self._started = True
        metrics = public_metrics(round, self._planned)
        if metrics:
            self._each(lambda tracker: tracker.log(round.t, metrics))

    def on_end(self, result: dict[str, Any]) -> None:
        """Log the run's final epsilons, which repeated rounds can make larger than planned."""
        figures = {f"epsilon_{view}": result["epsilon"][view] for view in FIGURES}
        found = {key: float(value) for key, value in figures.items() if value is not None}
        if self._started and found:
            self._each(lambda tracker: tracker.log(result["rounds"], found))

    def close(self) -> None:
        if self._started:
            self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            # Catch every error of a tracker: it must not end a run that has spent privacy.
            try:
                call(tracker)
            except Exception as error:
                del self._live[name]
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                print(
                    f"note: the tracker {name} failed and is left out from here on: {reason}",
                    file=sys.stderr,
                    flush=True,
                )

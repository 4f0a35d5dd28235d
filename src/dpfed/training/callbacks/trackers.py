"""Trackers: who else is told of a run while it goes on (`run.trackers`). `metrics.jsonl` is always written.

A tracker is three calls: `start(config)` when the first round is known, `log(round, metrics)`, `finish()`. It is told only
what may be published (report/public.py): no seed, no cohort, nothing of single clients. Nothing leaves this machine
unless its owner asks: MLflow writes where MLFLOW_TRACKING_URI says and otherwise into the run's folder, Weights & Biases
works offline unless WANDB_MODE says otherwise.
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
from dpfed.training.callbacks.public_figures import FIGURES, flat, public_metrics, public_settings
from dpfed.training.round_loop import Round

Settings = Mapping[str, Any]


class Tracker(Protocol):
    def start(self, settings: Settings) -> None: ...
    def log(self, t: int, metrics: Mapping[str, float]) -> None: ...
    def finish(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"

    def start(self, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rounds that a resumed run writes again are drawn over the old ones by their number.
        self._writer: Any = SummaryWriter(str(self._folder))
        text = "\n".join(f"    {key} = {value}" for key, value in settings.items())
        self._writer.add_text("configuration", text)

    def log(self, t: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(
                name, value, t, walltime=float(t)
            )  # times of rounds depend on private batches
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Mlflow:
    """A run in the store that MLFLOW_TRACKING_URI names, or in the run's folder `mlruns`."""

    def __init__(self, folder: Path) -> None:
        self._store = (
            os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        )

    def start(self, settings: Settings) -> None:
        if self._store.startswith("file:"):
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # newer versions ask whether files are meant
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._store)
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dpfed")
        found = self._client.get_experiment_by_name(named)
        experiment = found.experiment_id if found else self._client.create_experiment(named)
        self._run = self._client.create_run(experiment).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:500])

    def log(self, t: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=t, timestamp=t)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


class Wandb:
    """Offline, in the run's folder `wandb`, unless WANDB_MODE says otherwise; nothing about the machine is sent."""

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
    """Called before anything is written or charged."""
    for name in config.run.trackers:
        if importlib.util.find_spec(KINDS[name][1]) is None:
            raise DpfedError(
                f"run.trackers names {name}, which is not installed: pip install 'dpfed[{name}]', or leave it out"
            )
        if name == "wandb" and config.run.noise == "os":
            raise DpfedError(
                'wandb stores when each round ended, which depends on private batches: with run.noise = "os" take '
                "tensorboard or mlflow"
            )


class Trackers:
    """All trackers of a run. One that fails is named once and left out from there on; the run goes on."""

    def __init__(self, config: Config, folder: Path, planned: Planned | None) -> None:
        self._config, self._planned, self._begun = config, planned, False
        self._live = {name: KINDS[name][0](folder) for name in dict.fromkeys(config.run.trackers)}

    def beside(self, observe: Callable[[Round], None]) -> Callable[[Round], None]:
        """`observe`, with the trackers told first."""

        def told(round: Round) -> None:
            self.log(round)
            observe(round)

        return told if self._live else observe

    def log(self, round: Round) -> None:
        if not self._begun:
            settings = {
                k: json.dumps(v) for k, v in flat(public_settings(to_dict(self._config))).items()
            }
            self._each(lambda tracker: tracker.start(settings))
            self._begun = True
        metrics = public_metrics(round, self._planned)
        if metrics:
            self._each(lambda tracker: tracker.log(round.t, metrics))

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """The run's own figures at its end: where rounds were attempted again they are larger than the plan's."""
        figures = {f"epsilon_{view}": result["epsilon"][view] for view in FIGURES}
        found = {key: float(value) for key, value in figures.items() if value is not None}
        if self._begun and found:
            self._each(lambda tracker: tracker.log(result["rounds"], found))
        return result

    def finish(self) -> None:
        if self._begun:
            self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a service raises: a training that has been paid for does not end by it
                del self._live[name]
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                print(
                    f"note: the tracker {name} failed and is left out from here on: {reason}",
                    file=sys.stderr,
                    flush=True,
                )

"""Write one line per round to `metrics.jsonl`, and keep the first and the last round."""

from __future__ import annotations

from dpfed.training.callbacks.base import Callback
from dpfed.training.rounds import Round
from dpfed.training.run_folder.folder import RunFolder


class MetricsFile(Callback):
    """The metrics of a run; `rounds` holds the first and the last round that were reported."""

    def __init__(self, folder: RunFolder, rounds: list[Round]) -> None:
        self._folder = folder
        self.rounds = rounds

    def on_round(self, round: Round) -> None:
        self.rounds = [*self.rounds[:1], round]
        self._folder.log(round)

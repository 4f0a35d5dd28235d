"""The callback that writes one line per round to `metrics.jsonl`."""

from __future__ import annotations

from dpfed.training.callbacks.base import Callback
from dpfed.training.rounds import Round
from dpfed.training.run_folder.folder import RunFolder


class MetricsFile(Callback):
    """Callback that writes the metrics of each round to the file `metrics.jsonl`.

    The attribute `rounds` keeps the first and the last round of the run.
    """

    def __init__(self, folder: RunFolder, rounds: list[Round]) -> None:
        self._folder = folder
        self.rounds = rounds

    def on_round(self, round: Round) -> None:
        self.rounds = [*self.rounds[:1], round]
        self._folder.log(round)

"""The log of a server on stderr: a progress display for people, or one JSON object per line."""

from __future__ import annotations

from typing import Self

from dpfed.federation.log_line import LogLine, json_to_stderr
from dpfed.training.callbacks.base import Callback
from dpfed.training.callbacks.progress import ProgressDisplay, round_score, summary
from dpfed.training.evaluation import perplexity
from dpfed.training.job.job import Job
from dpfed.training.rounds import Round


class JsonDisplay(Callback):
    """Callback that writes each line of a server's log to stderr in the form of a JSON object."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._task = "classify"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def say(self, *lines: str) -> None:
        for line in lines:
            json_to_stderr(line)

    def on_start(self, job: Job) -> None:
        self._task = job.model.task.name
        self.say(*summary(job), *(f"note: {note}" for note in job.notes), *job.warnings)

    def on_round(self, round: Round) -> None:
        text = f"round {round.t}/{self._rounds}  {round_score(round, self._task)}"
        self.say(
            LogLine(
                text,
                "round",
                round=round.t,
                rounds=self._rounds,
                accuracy=round.accuracy,
                r2=round.r2,
                perplexity=perplexity(round.loss) if self._task == "causal" else None,
                epsilon=round.epsilon,
                clients=round.cohort,
                seconds=round.seconds,
            )
        )


def display_for(rounds: int, as_json: bool) -> ProgressDisplay | JsonDisplay:
    return JsonDisplay(rounds) if as_json else ProgressDisplay(rounds)

"""Progress of a run: a bar with accuracy, epsilon and time left on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpfed.engine.rounds import Round
from dpfed.privacy.published import show_loss, show_score


class Watch:
    """Shows rounds as they pass, on stderr; stdout is kept for results."""

    def __init__(self, rounds: int, lines: int = 10) -> None:
        self._rounds = rounds
        self._every = max(1, rounds // lines)
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("accuracy {task.fields[accuracy]}  epsilon {task.fields[epsilon]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("round", total=rounds, accuracy="", epsilon="")

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def round(self, round: Round) -> None:
        accuracy = None if round.accuracy is None else show_score(round.accuracy)
        epsilon = None if round.epsilon is None else show_loss(round.epsilon, 2)
        if self._bar is not None:
            shown: dict[str, Any] = {"accuracy": accuracy, "epsilon": epsilon}
            self._bar.update(self._task, completed=round.t, **{k: v for k, v in shown.items() if v is not None})
        elif round.t % self._every == 0 or round.t == self._rounds:
            self.say(
                f"round {round.t}/{self._rounds}  accuracy {accuracy or '-'}  epsilon {epsilon or '-'}  {round.seconds:.1f} s"
            )

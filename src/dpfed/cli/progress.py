"""Progress of a run: a bar with accuracy, epsilon and time left on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpfed.privacy.published import show_loss, show_score
from dpfed.training.callbacks.activity import Activity
from dpfed.training.round_loop import Round

Clock = Callable[[], float]
SILENCE_S = 10.0  # seconds without a line after which a plain log shows what is going on


class Watch:
    """Shows rounds, and the work inside them, on stderr; stdout is kept for results."""

    def __init__(self, rounds: int, lines: int = 10, clock: Clock = time.monotonic) -> None:
        self._rounds = rounds
        self._every = max(1, rounds // lines)
        self._clock = clock
        self._last_line = clock()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("accuracy {task.fields[accuracy]}  epsilon {task.fields[epsilon]}"),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[activity]}"),
                console=self._console,
            )
            empty: dict[str, Any] = {"accuracy": "", "epsilon": "", "activity": ""}
            self._task = self._bar.add_task("round", total=rounds, **empty)

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._task, activity="")
            self._bar.stop()

    def say(self, line: str) -> None:
        self._last_line = self._clock()
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def activity(self, activity: Activity) -> None:
        """Show progress inside a round: at once on a terminal, elsewhere after a silence."""
        if self._bar is not None:
            self._bar.update(self._task, activity=str(activity))
        elif self._clock() - self._last_line >= SILENCE_S:
            round = "" if activity.round is None else f"round {activity.round}/{self._rounds}  "
            self.say(f"{round}{activity}")

    def round(self, round: Round) -> None:
        accuracy = None if round.accuracy is None else show_score(round.accuracy)
        epsilon = None if round.epsilon is None else show_loss(round.epsilon, 2)
        if self._bar is not None:
            shown: dict[str, Any] = {"accuracy": accuracy, "epsilon": epsilon}
            self._bar.update(
                self._task, completed=round.t, **{k: v for k, v in shown.items() if v is not None}
            )
        elif round.t % self._every == 0 or round.t == self._rounds:
            self.say(
                f"round {round.t}/{self._rounds}  accuracy {accuracy or '-'}  epsilon {epsilon or '-'}  {round.seconds:.1f} s"
            )

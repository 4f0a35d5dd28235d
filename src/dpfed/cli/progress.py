"""Progress on stderr: a bar on a terminal, plain lines anywhere else; stdout is for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from dpfed.privacy.published import show_loss, show_score
from dpfed.text import counted

if TYPE_CHECKING:
    from dpfed.studies.study import EndedRun, Planned
    from dpfed.training.callbacks.activity import Activity
    from dpfed.training.round_loop import Round

# A plain log shows progress inside a round after this many seconds without a line.
SILENCE_S = 10.0
# A plain log of a run has about this many lines of rounds.
ROUND_LINES = 10


class Display:
    """A bar with named fields on a terminal; elsewhere only `say` prints."""

    def __init__(self, columns: list[ProgressColumn], total: int | None, **fields: str) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(*columns, console=console)
            shown: dict[str, Any] = dict(fields)
            self._task = self._bar.add_task("", total=total, **shown)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, *lines: str) -> None:
        """Print lines, above the bar if there is one."""
        for line in lines:
            if self._bar is not None:
                self._bar.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def _update(self, **fields: Any) -> bool:
        """Change fields of the bar; return False if there is no bar."""
        if self._bar is None:
            return False
        self._bar.update(self._task, **fields)
        return True


class Watch(Display):
    """Rounds of a run, and the progress inside a round."""

    def __init__(self, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        columns = [
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("accuracy {task.fields[accuracy]}  epsilon {task.fields[epsilon]}"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[activity]}"),
        ]
        super().__init__(columns, rounds, accuracy="", epsilon="", activity="")
        self._rounds = rounds
        self._clock = clock
        self._last_line = clock()

    def __exit__(self, *error: object) -> None:
        self._update(activity="")
        super().__exit__(*error)

    def say(self, *lines: str) -> None:
        """Print lines, and restart the timer of `activity`."""
        self._last_line = self._clock()
        super().say(*lines)

    def activity(self, activity: Activity) -> None:
        """Show progress inside a round: on a plain log only after SILENCE_S without a line."""
        if self._update(activity=str(activity)):
            return
        if self._clock() - self._last_line >= SILENCE_S:
            place = "" if activity.round is None else f"round {activity.round}/{self._rounds}  "
            self.say(f"{place}{activity}")

    def round(self, round: Round) -> None:
        """Show a completed round; a plain log shows about ROUND_LINES of them."""
        shown = {}
        if round.accuracy is not None:
            shown["accuracy"] = show_score(round.accuracy)
        if round.epsilon is not None:
            shown["epsilon"] = show_loss(round.epsilon, 2)
        if self._update(completed=round.t, **shown):
            return
        if round.t % max(1, self._rounds // ROUND_LINES) == 0 or round.t == self._rounds:
            figures = f"accuracy {shown.get('accuracy', '-')}  epsilon {shown.get('epsilon', '-')}"
            self.say(f"round {round.t}/{self._rounds}  {figures}  {round.seconds:.1f} s")


class StudyWatch(Display):
    """Runs of a study, as they end."""

    def __init__(self) -> None:
        columns = [
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, min_width=24)),
            BarColumn(bar_width=10),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
        ]
        super().__init__(columns, None, count="runs")

    def run(self, ended: EndedRun) -> None:
        """Show a run that has ended, and how many runs have."""
        outcome = ended.outcome
        if outcome.failed is not None:
            score = f"could not be run: {outcome.failed}"
        elif outcome.diverged:
            score = "diverged"
        else:
            score = f"accuracy {show_score(outcome.accuracy)}  loss {show_score(outcome.loss, 4)}"
        line = f"{ended.task.label}  {score}" + ("" if ended.fresh else "  (was done)")
        count = f"{ended.done} of {runs_in_words(ended.planned)}"
        bar = {"completed": ended.done, "total": ended.planned.runs}
        if not self._update(**bar, description=line, count=count) or outcome.failed is not None:
            self.say(f"{count}  {line}")


def runs_in_words(planned: Planned) -> str:
    """Return the number of runs, as a lower bound while a search can still grow."""
    bound = "at least " if planned.at_least else ""
    return bound + counted(planned.runs, "run")

"""Show a run on stderr: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpfed.privacy.published import show_loss, show_score
from dpfed.text import counted
from dpfed.training.callbacks.activity import Activity
from dpfed.training.callbacks.base import Callback
from dpfed.training.job.job import Job
from dpfed.training.job.message_size import traffic
from dpfed.training.result import guarantee
from dpfed.training.rounds import Round

Clock = Callable[[], float]
# Seconds without a line after which a plain log shows the current activity.
SILENCE_S = 10.0


class ProgressDisplay(Callback):
    """Show rounds and the work inside them on stderr; stdout is for results.

    show_warnings  print the job's warnings before round 1
    """

    def __init__(
        self,
        rounds: int,
        lines: int = 10,
        clock: Clock = time.monotonic,
        show_warnings: bool = True,
    ) -> None:
        self._show_warnings = show_warnings
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

    def __enter__(self) -> ProgressDisplay:
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

    def on_start(self, job: Job) -> None:
        for line in summary(job):
            self.say(line)
        for note in job.notes:
            self.say(f"note: {note}")
        if self._show_warnings:
            for line in warning_lines(job.warnings):
                self.say(line)

    def on_activity(self, activity: Activity) -> None:
        """Show progress inside a round: at once on a terminal, elsewhere after a silence."""
        if self._bar is not None:
            self._bar.update(self._task, activity=str(activity))
        elif self._clock() - self._last_line >= SILENCE_S:
            round = "" if activity.round is None else f"round {activity.round}/{self._rounds}  "
            self.say(f"{round}{activity}")

    def on_round(self, round: Round) -> None:
        accuracy = None if round.accuracy is None else show_score(round.accuracy)
        epsilon = None if round.epsilon is None else show_loss(round.epsilon, 2)
        if self._bar is not None:
            shown: dict[str, Any] = {"accuracy": accuracy, "epsilon": epsilon}
            self._bar.update(
                self._task, completed=round.t, **{k: v for k, v in shown.items() if v is not None}
            )
        elif round.t % self._every == 0 or round.t == self._rounds:
            scores = f"accuracy {accuracy or '-'}  epsilon {epsilon or '-'}"
            self.say(f"round {round.t}/{self._rounds}  {scores}  {round.seconds:.1f} s")


def summary(job: Job) -> list[str]:
    """Return the run in a few lines: sizes, traffic and privacy."""
    plan, schedule = job.plan, job.schedule
    lines = [
        f"{job.algorithm.name} on {job.config.data.name}: "
        f"{counted(schedule.clients, 'client')}, {schedule.cohort} per round, "
        f"{counted(schedule.rounds, 'round')} of {counted(schedule.local_steps, 'local step')}; "
        f"{job.config.model.name} with {counted(job.space.size, 'trainable number')} in "
        f"{counted(job.space.num_blocks, 'block')}",
    ]
    sent = traffic(job.algorithm, job.space)
    lines.append(
        f"each client and round: {sent.up_numbers:,} numbers up ({sent.up_bytes / 1e6:.2f} MB), "
        f"{sent.down_numbers:,} down ({sent.down_bytes / 1e6:.2f} MB)"
    )
    if plan.private:
        lines.append(f"privacy: {guarantee(job)}; clip norm {plan.clip:g}")
    else:
        lines.append("NO PRIVACY: noise is off, nothing that leaves a client is protected")
    return lines


def warning_lines(sentences: Sequence[str]) -> list[str]:
    return [f"warning: {sentence}" for sentence in sentences]

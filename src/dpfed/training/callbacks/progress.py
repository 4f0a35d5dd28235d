"""Show progress on stderr: a bar on a terminal or in a notebook, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from dpfed.errors import counted
from dpfed.privacy.published import show_loss, show_perplexity, show_score
from dpfed.training.callbacks.activity import Activity
from dpfed.training.callbacks.bars import bar_for
from dpfed.training.callbacks.base import Callback
from dpfed.training.evaluation import perplexity
from dpfed.training.job.job import Job
from dpfed.training.messages.message_size import traffic
from dpfed.training.result import guarantee
from dpfed.training.rounds import Round

# Without a progress bar, the current activity is printed if there was no output for this many
# seconds.
SILENCE_S = 10.0
# Without a progress bar, lines about this many rounds (approximately) are printed in the whole run.
ROUND_LINES = 10


class Display:
    """A progress bar on a terminal or in a notebook; elsewhere only plain lines of text.

    columns  columns of the bar on a terminal
    total    number at which the bar is full; None if unknown
    texts    named texts beside the bar
    """

    def __init__(self, columns: list[ProgressColumn], total: int | None, **texts: str) -> None:
        self._bar = bar_for(columns, total, texts)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, *lines: str) -> None:
        """Print lines on stderr, above the bar if there is one."""
        for line in lines:
            if self._bar is not None:
                self._bar.say(line)
            else:
                print(line, file=sys.stderr, flush=True)

    def _update(self, **fields: Any) -> bool:
        """Change numbers or texts of the progress bar; return False if there is no bar."""
        if self._bar is None:
            return False
        self._bar.update(**fields)
        return True


class ProgressDisplay(Display, Callback):
    """Callback that shows rounds and the work inside them on stderr; stdout is for results.

    rounds         number of rounds of the run
    clock          function that returns the time in seconds
    show_warnings  True: print the job's warnings before round 1
    """

    def __init__(
        self,
        rounds: int,
        clock: Callable[[], float] = time.monotonic,
        show_warnings: bool = True,
    ) -> None:
        columns = [
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[score]}  epsilon {task.fields[epsilon]}"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[activity]}"),
        ]
        super().__init__(columns, rounds, score="", epsilon="", activity="")
        self._task_name = "classify"
        self._show_warnings = show_warnings
        self._rounds = rounds
        self._clock = clock
        self._last_line = clock()

    def __exit__(self, *error: object) -> None:
        self._update(activity="")
        super().__exit__(*error)

    def say(self, *lines: str) -> None:
        """Print lines on stderr, and begin to measure the time without output again."""
        self._last_line = self._clock()
        super().say(*lines)

    def on_start(self, job: Job) -> None:
        self._task_name = job.model.task.name
        self.say(*summary(job), *(f"note: {note}" for note in job.notes))
        if self._show_warnings:
            self.say(*warning_lines(job.warnings))

    def on_activity(self, activity: Activity) -> None:
        """Show progress inside a round; without a bar, only after SILENCE_S without output."""
        if self._update(activity=str(activity)):
            return
        if self._clock() - self._last_line >= SILENCE_S:
            place = "" if activity.round is None else f"round {activity.round}/{self._rounds}  "
            self.say(f"{place}{activity}")

    def on_round(self, round: Round) -> None:
        """Show a completed round; without a bar, print only about ROUND_LINES rounds of a run."""
        shown = {}
        if round.loss is not None:
            shown["score"] = round_score(round, self._task_name)
        if round.epsilon is not None:
            shown["epsilon"] = show_loss(round.epsilon, 2)
        if self._update(completed=round.t, **shown):
            return
        if round.t % max(1, self._rounds // ROUND_LINES) == 0 or round.t == self._rounds:
            score = round_score(round, self._task_name)
            scores = f"{score}  epsilon {shown.get('epsilon', '-')}"
            self.say(f"round {round.t}/{self._rounds}  {scores}  {round.seconds:.1f} s")


def round_score(round: Round, task: str) -> str:
    """Return the name and the value of the main score of a task, such as "accuracy 0.912"."""
    if task == "regress":
        return f"R2 {'-' if round.r2 is None else show_score(round.r2)}"
    if task == "causal":
        value = perplexity(round.loss)
        return f"perplexity {'-' if value is None else show_perplexity(value)}"
    return f"accuracy {'-' if round.accuracy is None else show_score(round.accuracy)}"


def summary(job: Job) -> list[str]:
    """Return lines of text on a run: its clients and rounds, model, traffic and privacy."""
    plan, schedule = job.plan, job.schedule
    sent = traffic(job.algorithm, job.space, job.config.federation)
    privacy = "NO PRIVACY: noise is off, nothing that leaves a client is protected"
    if plan.private:
        privacy = f"privacy: {guarantee(job)}; clip norm {plan.clip:g}"
    return [
        f"{job.algorithm.name} on {job.config.data.name}: "
        f"{counted(schedule.clients, 'client')}, {schedule.cohort} per round, "
        f"{counted(schedule.rounds, 'round')} of {counted(schedule.local_steps, 'local step')}; "
        f"{job.config.model.name} with {counted(job.space.size, 'trainable number')} in "
        f"{counted(job.space.num_blocks, 'block')}",
        f"each client and round: {sent.up_numbers:,} numbers up ({sent.up_bytes / 1e6:.2f} MB), "
        f"{sent.down_numbers:,} down ({sent.down_bytes / 1e6:.2f} MB)",
        privacy,
    ]


def warning_lines(sentences: Sequence[str]) -> list[str]:
    return [f"warning: {sentence}" for sentence in sentences]

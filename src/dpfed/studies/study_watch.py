"""Show on stderr how many runs of a study have ended."""

from __future__ import annotations

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from dpfed.errors import counted
from dpfed.privacy.published import show_score
from dpfed.report.measures import ACCURACY, R2
from dpfed.studies.study import EndedRun, Planned
from dpfed.training.callbacks.progress import Display


class StudyWatch(Display):
    """A progress bar over the runs of a study."""

    def __init__(self) -> None:
        columns = [
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, min_width=24)),
            BarColumn(bar_width=10),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
        ]
        super().__init__(columns, None, count="runs")

    def run(self, ended: EndedRun) -> None:
        """Show the result of a run that has ended, and the number of ended runs."""
        outcome = ended.outcome
        if outcome.failed is not None:
            score = f"could not be run: {outcome.failed}"
        elif outcome.diverged:
            score = "diverged"
        else:
            measure = R2 if outcome.accuracy is None else ACCURACY
            reached = f"{measure.name} {show_score(outcome.main(measure))}"
            score = f"{reached}  loss {show_score(outcome.loss, 4)}"
        line = f"{ended.task.label}  {score}" + ("" if ended.fresh else "  (was done)")
        count = f"{ended.done} of {runs_in_words(ended.planned)}"
        bar = {"completed": ended.done, "total": ended.planned.runs}
        if not self._update(**bar, description=line, count=count) or outcome.failed is not None:
            self.say(f"{count}  {line}")


def runs_in_words(planned: Planned) -> str:
    """Return the number of runs as text; with "at least" if the search may add more runs."""
    bound = "at least " if planned.at_least else ""
    return bound + counted(planned.runs, "run")

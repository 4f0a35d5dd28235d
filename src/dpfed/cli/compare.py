"""`dpfed compare`: methods side by side, each at its own best learning rate, found with equal effort."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dpfed.errors import counted
from dpfed.privacy.published import show_score, show_setting

if TYPE_CHECKING:
    from dpfed.studies.study import ArmResult, EndedRun, Planned, Study
    from dpfed.studies.tables import Table

PLAIN_WIDTH = 100  # columns of a table that goes to a file or a pipe
PRESET_HELP = (
    "an ablation or grid of the paper: ablation-components, ablation-aggregation, gamma, sigma, epsilon, alpha, clip, rho, "
    "weight-decay, cohort, local-steps, diagnostics"
)


def compare(
    config: Annotated[
        str | None, typer.Argument(help="TOML file or preset; without it: the digits demonstration")
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="methods, variants NAME:key=value;key=value, or all"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="reported seeds, from run.seed on")] = 3,
    search_seeds: Annotated[
        int, typer.Option(help="other seeds by whose mean a rate is judged in the search")
    ] = 1,
    lr: Annotated[
        list[str] | None,
        typer.Option("--lr", metavar="NAME=v1,v2", help="values a method's search begins with"),
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help=PRESET_HELP)] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder of the study; default: one under runs/ named after what is asked"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes; default: one per core or per GPU")
    ] = None,
    pack: Annotated[
        str,
        typer.Option(
            metavar="N", help="runs computed together by one process; auto: 16 on a GPU, 1 on a CPU"
        ),
    ] = "auto",
    force: Annotated[
        bool, typer.Option(help="replace another study in the folder; equal runs are kept")
    ] = False,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Compare methods, each at its best learning rate. Interrupted, the same command goes on where it stopped.

    Example: dpfed compare --algorithms dp-fedavg,dp-fedadamw,"dp-fedadamw:gamma=0" --seeds 3
    """
    from dpfed.registry import DEFAULT, registry
    from dpfed.studies.output import FILES, write
    from dpfed.studies.pool import Pool, default_workers
    from dpfed.studies.study import Progress, check, claim, conduct
    from dpfed.training.backends.batched_runs import pack_size

    study = study_of(
        config or DEFAULT, overrides or [], algorithms, preset, lr or [], seeds, search_seeds
    )
    check(study, registry())
    folder = out or Path("runs") / study.name
    count, gpus = default_workers(str(study.base["run"]["device"]))
    count = workers or count
    together = pack_size(pack, gpus)
    with claim(folder, study, force), Pool(count, gpus) as pool, Watch() as watch:
        planned = runs_in_words(Progress(study, registry()).planned())
        arms = counted(len(study.arms), "arm")
        watch.say(f"{arms}, {planned}, {count} at a time, into {folder}")
        try:
            results = conduct(study, folder, pool, registry(), watch.run, together, count)
        except KeyboardInterrupt:
            watch.say("stopped: the same command goes on from here, finished runs are kept")
            raise
        for line in choices(results):
            watch.say(line)
    table = write(study, results, folder)
    show(table, folder)
    print(f"written to {folder}: {', '.join(name for name in FILES if (folder / name).exists())}")
    if as_json:
        print(
            json.dumps(
                {
                    **json.loads((folder / "table.json").read_text(encoding="utf-8")),
                    "out": str(folder),
                }
            )
        )
    report_failures(results)


def study_of(
    source: str,
    overrides: list[str],
    algorithms: str | None,
    preset: str | None,
    lr: list[str],
    seeds: int,
    search_seeds: int = 1,
) -> Study:
    from dpfed.config import build, load, overlay, to_dict
    from dpfed.config.parsing import overrides_layer
    from dpfed.errors import DpfedError
    from dpfed.registry import registry
    from dpfed.studies.arms import parse_arms, parse_grids, parse_names
    from dpfed.studies.presets import preset_arms
    from dpfed.studies.study import Study

    known = registry()
    base = load(source, overrides, known)
    grids = parse_grids(lr, known)
    title, axis = f"{base.model.name} on {base.data.name}", ""
    if preset is None:
        arms = parse_arms(algorithms or "all", base, known, grids)
    else:
        # which variants `all` has depends on how the noise is given, and these presets give it anew
        given = {"sigma": ["privacy.sigma=1"], "epsilon": ["privacy.target_epsilon=1"]}.get(
            preset, []
        )
        changed = build(overlay(to_dict(base), overrides_layer(given)), known)
        named = algorithms and parse_names(algorithms, changed, known)
        chosen, arms = preset_arms(preset, named or None, base, known, grids)
        title, axis = f"{chosen.title}: {title}", chosen.axis
    for name in grids:
        method = name.removesuffix(".server_lr")
        if not any(
            method in (arm.label, arm.overrides[0].removeprefix("algorithm.name=")) for arm in arms
        ):
            raise DpfedError(
                f"--lr names {method}, which is not among the arms: {', '.join(a.label for a in arms)}"
            )
    return Study(to_dict(base), tuple(arms), seeds, title, axis, search_seeds=search_seeds)


def report_failures(results: Sequence[ArmResult]) -> None:
    """Raise StoppedError if arms could not be run; the others have their results."""
    from dpfed.errors import StoppedError

    failed = [f"{result.arm.label}: {result.failed}" for result in results if result.failed]
    if failed:
        arms = counted(len(results), "arm")
        raise StoppedError(f"{len(failed)} of {arms} could not be run; the first, {failed[0]}")


def runs_in_words(planned: Planned) -> str:
    return f"{'at least ' if planned.at_least else ''}{counted(planned.runs, 'run')}"


def choices(results: Sequence[ArmResult]) -> list[str]:
    """Return a line for each tuned arm: the chosen rates and the score that decided."""
    from dpfed.studies.search import decision

    lines = []
    for result in results:
        if result.point and result.failed is None:
            chosen = zip(result.arm.grids, result.point, strict=True)
            rates = " ".join(f"{key}={show_setting(value)}" for key, value in chosen)
            lines.append(f"{result.arm.label}  chosen {rates}: {decision(result.tuned)}")
    return lines


class Watch:
    """Runs as they end, on stderr: a bar on a terminal, lines anywhere else."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, min_width=24)),
                BarColumn(bar_width=10),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=None, count="runs")

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
            self._bar.stop()

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def run(self, ended: EndedRun) -> None:
        """Show a run that is done, and how many of all runs are done."""
        outcome = ended.outcome
        if outcome.failed is not None:
            score = f"could not be run: {outcome.failed}"
        elif outcome.diverged:
            score = "diverged"
        else:
            score = f"accuracy {show_score(outcome.accuracy)}  loss {show_score(outcome.loss, 4)}"
        line = f"{ended.task.label}  {score}" + ("" if ended.fresh else "  (was done)")
        count = f"{ended.done} of {runs_in_words(ended.planned)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=ended.done, total=ended.planned.runs)
            self._bar.update(self._task, description=line, count=count)
        if self._bar is None or outcome.failed is not None:
            self.say(f"{count}  {line}")


def show(table: Table, folder: Path) -> None:
    """Print the table as far as it fits: the terminal's width, or 100 columns elsewhere."""
    from rich.console import Console
    from rich.table import Table as Drawn

    from dpfed.studies.tables import best_of, cells, footnotes, larger_epsilon, shown_columns

    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    head, body = cells(table)
    widths = shown_columns(head, body, console.width)
    drawn = Drawn(title=table.title, title_justify="left")
    for i, width in widths.items():
        justify: Literal["left", "right"] = "left" if i < 2 else "right"
        drawn.add_column(head[i], justify=justify, overflow="fold", width=width)
    best = set() if table.axis else best_of(table.rows, larger_epsilon(table))
    for row, line in zip(table.rows, body, strict=True):
        drawn.add_row(*(line[i] for i in widths), style="bold" if row.label in best else None)
    console.print(drawn, markup=False)
    absent = [word for i, word in enumerate(head) if i not in widths]
    notes = [*footnotes(table), *table.notes]
    if absent:
        whole = folder / "table.md"
        notes.insert(0, f"left out for the width: {', '.join(absent)}; {whole} has all columns")
    for note in notes:
        console.print(note, markup=False, highlight=False)

"""`dpfed compare`: compare methods, each at its best learning rate, with equal search effort."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dpfed.cli.options import AsJson, Debug, Overrides, Target, show
from dpfed.errors import StoppedError, counted
from dpfed.privacy.published import show_setting

if TYPE_CHECKING:
    from dpfed.report.tables import Table
    from dpfed.studies.study import ArmResult, Study

# Width in characters of a results table that is printed to a file or a pipe instead of a terminal.
PLAIN_WIDTH = 100
PRESET_HELP = (
    "an ablation or grid of the paper: ablation-components, ablation-aggregation, gamma, sigma, "
    "epsilon, alpha, clip, rho, weight-decay, cohort, local-steps, diagnostics"
)
Algorithms = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="methods, variants NAME:key=value;key=value, or all"),
]
Seeds = Annotated[int, typer.Option(help="reported seeds, from run.seed on")]
SearchSeeds = Annotated[
    int, typer.Option(help="other seeds, over which the search averages the score of a rate")
]
Rates = Annotated[
    list[str] | None,
    typer.Option("--lr", metavar="NAME=v1,v2", help="values a method's search begins with"),
]
Preset = Annotated[str | None, typer.Option(metavar="NAME", help=PRESET_HELP)]
Out = Annotated[
    Path | None,
    typer.Option(help="folder of the study; default: one under runs/, named after the question"),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="processes; default: one per core or per GPU")
]
Pack = Annotated[
    str,
    typer.Option(
        metavar="N", help="runs computed together by one process; auto: 16 on a GPU, 1 on a CPU"
    ),
]
Force = Annotated[
    bool, typer.Option(help="replace another study in the folder; equal runs are kept")
]


def compare(
    config: Target = None,
    algorithms: Algorithms = None,
    seeds: Seeds = 3,
    search_seeds: SearchSeeds = 1,
    lr: Rates = None,
    preset: Preset = None,
    overrides: Overrides = None,
    out: Out = None,
    workers: Workers = None,
    pack: Pack = "auto",
    force: Force = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods, each at its best learning rate. If interrupted, the same command resumes.

    Example: dpfed compare --algorithms dp-fedavg,dp-fedadamw,"dp-fedadamw:gamma=0" --seeds 3
    """
    from dpfed.registry import DEFAULT, registry
    from dpfed.studies.output import FILES, write
    from dpfed.studies.packs import Packing
    from dpfed.studies.pool import Pool, default_workers
    from dpfed.studies.study import Progress, check, claim, conduct
    from dpfed.studies.study_watch import StudyWatch, runs_in_words
    from dpfed.training.backends.batched_runs import pack_size

    known = registry()
    study = study_of(
        config or DEFAULT, overrides or [], algorithms, preset, lr or [], seeds, search_seeds
    )
    check(study, known)
    folder = out or Path("runs") / study.name
    count, gpus = default_workers(str(study.base["run"]["device"]))
    count = workers or count
    packing = Packing(pack_size(pack, gpus), count)
    with claim(folder, study, force), Pool(count, gpus) as pool, StudyWatch() as watch:
        planned = runs_in_words(Progress(study, known).planned())
        watch.say(f"{counted(len(study.arms), 'arm')}, {planned}, {count} at a time, into {folder}")
        try:
            results = conduct(study, folder, pool, known, watch.run, packing)
        except KeyboardInterrupt:
            watch.say("stopped: the same command goes on from here, finished runs are kept")
            raise
        watch.say(*choices(results))
    show_table(write(study, results, folder), folder)
    files = ", ".join(name for name in FILES if (folder / name).exists())
    written = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    show([f"written to {folder}: {files}"], {**written, "out": str(folder)}, as_json)
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
    """Return the study (a comparison of methods) that the options of `dpfed compare` describe."""
    from dpfed.config import load
    from dpfed.registry import registry
    from dpfed.studies.question import Question, study_from

    known = registry()
    question = Question(algorithms, tuple(lr), preset, seeds, search_seeds)
    return study_from(load(source, overrides, known), question, known)


def report_failures(results: Sequence[ArmResult]) -> None:
    """Raise StoppedError if a method could not run.

    The results of the other methods are already written.
    """
    from dpfed.studies.output import failures

    failed = failures(results)
    if failed:
        arms = counted(len(results), "arm")
        raise StoppedError(f"{len(failed)} of {arms} could not be run; the first, {failed[0]}")


def choices(results: Sequence[ArmResult]) -> list[str]:
    """Return a line for each tuned method: the chosen learning rates, and why they were chosen."""
    from dpfed.studies.search import decision

    lines = []
    for result in results:
        if not result.point or result.failed is not None:
            continue
        chosen = zip(result.arm.grids, result.point, strict=True)
        rates = " ".join(f"{key}={show_setting(value)}" for key, value in chosen)
        lines.append(f"{result.arm.label}  chosen {rates}: {decision(result.tuned)}")
    return lines


def show_table(table: Table, folder: Path) -> None:
    """Print those columns of the results table that fit into the terminal, and notes below it.

    Without a terminal, the width is 100 characters.

    folder  folder of the study, where table.md has all columns
    """
    from rich.console import Console
    from rich.table import Table as Drawn

    from dpfed.report.tables import best_of, cells, footnotes, larger_epsilon, shown_columns

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

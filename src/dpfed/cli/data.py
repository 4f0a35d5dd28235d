"""`dpfed data`: describe a data source and its partition over clients."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Overrides, Target, settings_of, show
from dpfed.cli.overview import Command, Group
from dpfed.errors import DpfedError, counted

if TYPE_CHECKING:
    import numpy as np

    from dpfed.config import Config
    from dpfed.data.partition import Shards
    from dpfed.data.tables import Source
    from dpfed.model.zoo.causal_records import TargetCounts

HELP = "Look at data sources and partitions."
SHOWN_CLIENTS = 20
SHOWN_CLASSES = 12
LONGEST_NAME = 24
WARNING = (
    "these are counts of private {}, read without noise: for simulations only, never for release"
)
data = typer.Typer(name="data", cls=Group, help=HELP, no_args_is_help=True)


@data.callback()
def group() -> None:
    """Do nothing: without this function, typer would drop the name `describe`, its only command."""


@data.command("describe", cls=Command)
def describe(
    config: Target = None,
    overrides: Overrides = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw the client x label table into this .png or .svg")
    ] = None,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Show the data of a configuration: records, classes, and record counts by client and label.

    For a language model, show how many target tokens the records keep at model.max_length.

    Example: dpfed data describe --set data.alpha=0.1
    """
    settings = settings_of(config, overrides)
    from dpfed.privacy.noise import Streams
    from dpfed.training.job.data import configured_source, shards_for
    from dpfed.training.job.notes import data_notes, data_warnings
    from dpfed.training.run_folder.label_counts import label_counts

    # Read only the training records, because a client on a network may have no test set.
    source = configured_source(settings.data, settings.model, "train")
    shards = shards_for(settings, source, Streams(settings.run.seed))
    counts = label_counts(source.train.labels, shards, len(source.classes))
    found = plain(settings, source, shards, counts)
    found["notes"] = data_notes(settings, source, shards)
    found["warnings"] = data_warnings(settings, source, shards)
    targets = target_counts(settings, source)
    if targets:
        found["targets"] = {part: asdict(counted_part) for part, counted_part in targets.items()}
        found["warnings"] += lost_warnings(settings, targets)
    lines = [
        *opening(settings, source, found["inputs"]),
        *target_lines(settings, targets),
        *(table(counts, source.classes, shards.names) if counts.shape[1] else []),
        sizes_line(found["sizes"], len(shards), settings.data.unit_column or "record"),
        *(f"note: {note}" for note in found["notes"]),
        *(f"warning: {warning}" for warning in found["warnings"]),
        f"NOTE: {found['release']}",
    ]
    if plot is not None:
        if not counts.shape[1]:
            raise DpfedError("--plot draws the labels of the clients, and these data have none")
        from dpfed.report.figures.plots import label_table

        title = f"{settings.data.name}, {rule(settings)}\nsimulation: not for release"
        label_table(counts, source.classes, title, plot, shards.names)
        lines.append(f"drawn into {plot}")
    show(lines, found, as_json)


def target_counts(settings: Config, source: Source) -> dict[str, TargetCounts]:
    """Return the counts of target tokens in the training and test records of a language model.

    The keys are "train" and "test". The dict is empty if the model is no language model.
    """
    from dpfed.data.language import LANGUAGE_INPUTS

    model: Any = settings.model
    if source.train.inputs.keys().isdisjoint(LANGUAGE_INPUTS) or not hasattr(model, "is_causal"):
        return {}
    if not model.is_causal(len(source.classes)):
        return {}
    parts = {"train": source.train.inputs}
    if source.test is not source.train:
        parts["test"] = source.test.inputs
    return {part: model.target_counts(inputs, part) for part, inputs in parts.items()}


def target_lines(settings: Config, targets: dict[str, TargetCounts]) -> list[str]:
    model: Any = settings.model
    return [
        f"{part}: {found.targets:,} target tokens in records of {model.max_length} tokens (longest "
        f"before the cut: {found.longest:,}); {counted(found.shortened, 'record')} cut inside "
        f"the targets, {found.lost:,} without any target"
        for part, found in targets.items()
    ]


def lost_warnings(settings: Config, targets: dict[str, TargetCounts]) -> list[str]:
    """Return a warning for each table in which some records have lost all target tokens.

    Records are cut at model.max_length, and the cut can remove their targets.
    """
    model: Any = settings.model
    return [
        f"{found.lost:,} of {counted(found.records, f'{part} record')} have no target within "
        f"model.max_length = {model.max_length}, so nothing is learnt from them: raise it, or "
        "shorten the texts before the targets"
        for part, found in targets.items()
        if found.lost
    ]


def rule(settings: Config) -> str:
    section = settings.data
    if section.partition == "natural":
        return f"natural partition by {section.client_column}"
    alpha = f" (alpha = {section.alpha:g})" if section.partition.startswith("dirichlet") else ""
    return f"{section.partition}{alpha}, seed {settings.run.seed}"


def opening(settings: Config, source: Source, inputs: dict[str, str]) -> list[str]:
    each = ", ".join(f"{name} {shape}" for name, shape in inputs.items())
    names = ", ".join(source.classes[:SHOWN_CLASSES])
    more = ", ..." if len(source.classes) > SHOWN_CLASSES else ""
    origin = "" if source.declared else " (read off the labels)"
    classes = f"{len(source.classes)} classes{origin}: {names}{more}"
    test = f"{len(source.test):,} of the test set"
    if source.test is source.train:
        test = "no test set"
    return [
        f"{settings.data.name}: {len(source.train):,} training records of the clients, {test}",
        f"each: {each}",
        _label_line(source, classes),
        f"partition: {rule(settings)}",
    ]


def _label_line(source: Source, classes: str) -> str:
    """Return the line that describes the labels.

    classes  the line to return if the labels are classes
    """
    if source.task == "regress":
        return f"labels are numbers: {source.classes[0]}"
    if source.task == "multilabel":
        return f"several labels for a record: {classes}"
    return classes if source.classes else "no labels"


def table(counts: np.ndarray, classes: tuple[str, ...], names: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of a table of record counts: one row per client, one column per class.

    Only the first clients and classes are shown. The column "+N more" has the sums of the N other
    classes.
    """
    clients = [" ".join(name.split())[:LONGEST_NAME] for name in names]
    clients = clients or [str(client) for client in range(len(counts))]
    column = max(8, *(len(name) for name in clients[:SHOWN_CLIENTS]))
    shown = counts[:SHOWN_CLIENTS, :SHOWN_CLASSES]
    heads = [name[:10] for name in classes[:SHOWN_CLASSES]]
    widths = [max(len(head), len(str(shown[:, i].max())), 4) + 2 for i, head in enumerate(heads)]
    hidden = counts.shape[1] - len(heads)

    def row(client: str, cells: list[Any], rest: Any, total: Any) -> str:
        middle = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        added = f"{rest:>12}" if hidden else ""
        return f"{client:>{column}}{middle}{added}{total:>9}"

    lines = [row("client", heads, f"+{hidden} more", "all")]
    for client, cells in enumerate(shown):
        every = counts[client]
        lines.append(row(clients[client], list(cells), every[len(heads) :].sum(), every.sum()))
    if len(counts) > SHOWN_CLIENTS:
        more_clients = counted(len(counts) - SHOWN_CLIENTS, "more client")
        lines.append(f"     ... and {more_clients} (--json has all of them)")
    return lines


def sizes_line(sizes: dict[str, Any], clients: int, unit: str) -> str:
    return (
        f"{counted(clients, 'client')} of {sizes['min']} to {sizes['max']} "
        f"(median {sizes['median']:g}) protected units, each one {unit}"
    )


def plain(settings: Config, source: Source, shards: Shards, counts: np.ndarray) -> dict[str, Any]:
    """Return the description of the data as an object for JSON, without notes and warnings."""
    import numpy as np

    inputs = {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in source.train.inputs.items()}
    if source.kind == "text":
        inputs = dict.fromkeys(source.train.inputs, "text")
    return {
        "name": settings.data.name,
        "kind": source.kind,
        "train": len(source.train),
        "test": 0 if source.test is source.train else len(source.test),
        "classes": list(source.classes),
        "declared": source.declared,
        "inputs": inputs,
        "partition": settings.data.partition,
        "alpha": settings.data.alpha,
        "clients": len(shards),
        "client_names": list(shards.names),
        "sizes": {
            "min": int(shards.sizes.min()),
            "median": float(np.median(shards.sizes)),
            "max": int(shards.sizes.max()),
        },
        "unused": len(source.train) - len(shards.records),
        "table": counts.tolist(),
        "release": WARNING.format("labels" if source.classes else "records"),
    }

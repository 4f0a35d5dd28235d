"""`dpfed data`: look at a data source and at who holds what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.overview import Command, Group
from dpfed.text import counted

if TYPE_CHECKING:
    import numpy as np

    from dpfed.config import Config
    from dpfed.data.partition import Shards
    from dpfed.data.tables import Source

HELP = "Look at data sources and partitions."
data = typer.Typer(name="data", cls=Group, help=HELP, no_args_is_help=True)
SHOWN_CLIENTS, SHOWN_CLASSES = 20, 12
LONGEST_NAME = 24
WARNING = "these are counts of private labels, read without noise: for simulations only, never for release"


@data.callback()
def group() -> None:
    """Keeps `describe` a command of its own while it is the only one."""


@data.command("describe", cls=Command)
def describe(
    config: Annotated[
        str | None, typer.Argument(help="TOML file or preset; without it: the digits demonstration")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw the client x label table into this .png or .svg")
    ] = None,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Records, classes and the client x label table of a configuration. Example: dpfed data describe --set data.alpha=0.1"""
    from dpfed.config import load
    from dpfed.registry import DEFAULT, registry

    settings = load(config or DEFAULT, overrides or [], registry())
    from dpfed.privacy.noise import Streams
    from dpfed.training.job.data import shards_for
    from dpfed.training.job.notes import data_notes, data_warnings

    loader: Any = settings.data
    source: Source = loader.load()
    shards = shards_for(settings, source, Streams(settings.run.seed))
    counts = label_counts(source, shards)
    for line in [*opening(settings, source), *table(counts, source.classes, shards.names)]:
        print(line)
    print(sizes_line(settings, shards))
    for note in data_notes(settings, source, shards):
        print(f"note: {note}")
    for warning in data_warnings(settings, source, shards):
        print(f"warning: {warning}")
    print(f"NOTE: {WARNING}")
    if plot is not None:
        from dpfed.studies.plots import label_table

        label_table(
            counts,
            source.classes,
            f"{settings.data.name}, {rule(settings)}\nsimulation: not for release",
            plot,
            shards.names,
        )
        print(f"drawn into {plot}")
    if as_json:
        print(json.dumps(plain(settings, source, shards, counts), allow_nan=False))


def label_counts(source: Source, shards: Shards) -> np.ndarray:
    """Records of each label at each client."""
    import numpy as np

    out = np.zeros((len(shards), len(source.classes)), dtype=np.int64)
    for client in range(len(shards)):
        out[client] = np.bincount(
            source.train.labels[shards.of(client)], minlength=len(source.classes)
        )
    return out


def rule(settings: Config) -> str:
    section = settings.data
    if section.partition == "natural":
        return f"natural partition by {section.client_column}"
    alpha = f" (alpha = {section.alpha:g})" if section.partition.startswith("dirichlet") else ""
    return f"{section.partition}{alpha}, seed {settings.run.seed}"


def shapes(source: Source) -> dict[str, str]:
    """What one record is made of."""
    if source.kind == "text":
        return dict.fromkeys(source.train.inputs, "text")
    return {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in source.train.inputs.items()}


def opening(settings: Config, source: Source) -> list[str]:
    inputs = ", ".join(f"{name} {shape}" for name, shape in shapes(source).items())
    names = ", ".join(source.classes[:SHOWN_CLASSES]) + (
        ", ..." if len(source.classes) > SHOWN_CLASSES else ""
    )
    origin = "" if source.declared else " (read off the labels)"
    return [
        f"{settings.data.name}: {len(source.train):,} training records of the clients, {len(source.test):,} of the test set",
        f"each: {inputs}",
        f"{len(source.classes)} classes{origin}: {names}",
        f"partition: {rule(settings)}",
    ]


def table(counts: np.ndarray, classes: tuple[str, ...], names: tuple[str, ...] = ()) -> list[str]:
    """The first clients and classes; what is left out is said."""
    clients = [" ".join(name.split())[:LONGEST_NAME] for name in names] or [
        str(i) for i in range(len(counts))
    ]
    column = max(8, *(len(name) for name in clients[:SHOWN_CLIENTS]))
    shown = counts[:SHOWN_CLIENTS, :SHOWN_CLASSES]
    heads = [name[:10] for name in classes[:SHOWN_CLASSES]]
    widths = [max(len(head), len(str(shown[:, i].max())), 4) + 2 for i, head in enumerate(heads)]
    more = counts.shape[1] - len(heads)
    lines = [
        f"{'client':>{column}}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True))
        + (f"{f'+{more} more':>12}" if more else "") + f"{'all':>9}"
    ]  # fmt: skip
    for client, row in enumerate(shown):
        rest = f"{counts[client, len(heads) :].sum():>12}" if more else ""
        cells = "".join(f"{n:>{w}}" for n, w in zip(row, widths, strict=True))
        lines.append(f"{clients[client]:>{column}}{cells}{rest}{counts[client].sum():>9}")
    if len(counts) > SHOWN_CLIENTS:
        more_clients = counted(len(counts) - SHOWN_CLIENTS, "more client")
        lines.append(f"     ... and {more_clients} (--json has all of them)")
    return lines


def sizes_line(settings: Config, shards: Shards) -> str:
    import numpy as np

    unit = settings.data.unit_column or "record"
    sizes = shards.sizes
    return (
        f"{counted(len(shards), 'client')} of {sizes.min()} to {sizes.max()} "
        f"(median {np.median(sizes):g}) protected units, each one {unit}"
    )


def plain(settings: Config, source: Source, shards: Shards, counts: np.ndarray) -> dict[str, Any]:
    import numpy as np

    from dpfed.training.job.notes import data_notes, data_warnings

    return {
        "name": settings.data.name,
        "kind": source.kind,
        "train": len(source.train),
        "test": len(source.test),
        "classes": list(source.classes),
        "declared": source.declared,
        "inputs": shapes(source),
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
        "notes": data_notes(settings, source, shards),
        "warnings": data_warnings(settings, source, shards),
        "release": WARNING,
    }

"""`dpfed bench`: time a private training step, and other implementations of it, on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, show
from dpfed.errors import DpfedError

if TYPE_CHECKING:
    import torch

    from dpfed.bench.cases import Case


def bench(
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="only this model; may be repeated")
    ] = None,
    ways: Annotated[
        list[str] | None, typer.Option("--way", help="only this way; may be repeated")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    repeats: Annotated[
        int, typer.Option(min=1, help="timed steps, of which the median counts")
    ] = 15,
    clients: Annotated[int | None, typer.Option(min=1, help="number of clients S")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="records of each client")] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="with model.gradient_checkpointing = true")
    ] = False,
    quantize: Annotated[str, typer.Option(help="model.quantize: none, int8 or 4bit")] = "none",
    out: Annotated[Path | None, typer.Option(help="write the figures to this JSON file")] = None,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Time a private training step, and other private and non-private implementations of it.

    Example: dpfed bench --case vit-6x192
    """
    from dpfed.bench.run import OTHERS, compare, plain
    from dpfed.model.frozen.quantised import LIBRARY
    from dpfed.training.job.device import device_of

    where = device_of(device)
    if quantize not in ("none", *LIBRARY):
        raise DpfedError(f"--quantize {quantize}: choose from none, {', '.join(LIBRARY)}")
    changes: dict[str, Any] = {"clients": clients, "batch": batch, "quantize": quantize}
    changes = {key: value for key, value in changes.items() if value is not None}
    found = []
    for chosen in _chosen(cases, ways or [], where):
        case = replace(chosen, checkpoint=checkpoint, **changes)
        found.append(compare(case, where, repeats, only=ways or None))
        print(*lines(found[-1]), sep="\n", flush=True)
    figures: dict[str, Any] = plain(found, where)
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    if out is not None:
        try:
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DpfedError(f"{out} cannot be written: {error.strerror or error}") from None
    show([f"on {figures['device']}; {versions}", OTHERS], figures, as_json)


def _chosen(cases: list[str] | None, ways: list[str], where: torch.device) -> list[Case]:
    """Return the benchmark cases to measure.

    Raise DpfedError for a case, or an implementation in `ways`, that `dpfed bench` cannot measure
    on this device.
    """
    from dpfed.bench.cases import CPU, GPU
    from dpfed.bench.run import ways_of

    known = {case.model: case for case in (GPU if where.type == "cuda" else CPU)}
    names = cases or list(known)
    asked = [(f"--case {name}", name, list(known)) for name in names]
    for name in set(names) & known.keys():
        measured = [way for way, _ in ways_of(known[name], where)]
        asked += [(f"--way {way!r}", way, measured) for way in ways]
    for option, name, choices in asked:
        if name not in choices:
            raise DpfedError(
                f"{option} is not measured on this device: choose from {', '.join(choices)}"
            )
    return [known[name] for name in names]


def lines(comparison: Any) -> list[str]:
    """Return the lines of a table with the time of each implementation of a step.

    The table also has the ratio of each time to the time of dpfed's private step.
    """
    settings = ", checkpointed" if comparison.checkpoint else ""
    if comparison.quantize != "none":
        settings += f", {comparison.quantize} base"
    shown = [
        f"{comparison.case}: {comparison.clients} clients x {comparison.batch} records, "
        f"one local step{settings}"
    ]
    for way in comparison.ways:
        if way.milliseconds is None:
            shown.append(f"  {way.way:22} -  {way.failed}")
            continue
        speed = comparison.records_per_second(way.way)
        line = f"  {way.way:22} {way.milliseconds:9.1f} ms {speed:8.1f} records/s "
        ratio = comparison.ratio(way.way, "private")
        if ratio is not None:
            line += f"{ratio:6.2f} x the private step"
        if way.peak is not None:
            line += f"   peak {way.peak:.1f} GiB"
        ratio = comparison.processor_ratio(way.way, "private")
        if ratio is not None:
            line += f"   CPU time {way.processor:9.1f} ms {ratio:6.2f} x"
        if way.created is not None:
            line += f"   new tensors {way.created:.1f} MiB"
        shown.append(line)
    return shown

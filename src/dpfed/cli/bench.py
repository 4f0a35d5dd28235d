"""`dpfed bench`: this machine's ratios against peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="only this model; may be given again")
    ] = None,
    ways: Annotated[
        list[str] | None, typer.Option("--way", help="only this way; may be given again")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    repeats: Annotated[
        int, typer.Option(min=1, help="timed steps, of which the median counts")
    ] = 15,
    out: Annotated[Path | None, typer.Option(help="write the figures to this JSON file")] = None,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Time one private step of a fleet beside non-private and other private ways. Example: dpfed bench --case vit-6x192"""
    from dpfed.bench.cases import CPU, GPU
    from dpfed.bench.run import OTHERS, Comparison, compare, plain, ways_of
    from dpfed.errors import DpfedError
    from dpfed.training.job.device import device_of

    where = device_of(device)
    known = {case.model: case for case in (GPU if where.type == "cuda" else CPU)}
    wanted = cases or list(known)
    for name in wanted:
        if name not in known:
            raise DpfedError(
                f"--case {name} is not measured on this device: choose from {', '.join(known)}"
            )
        there = [way for way, _ in ways_of(known[name], where)]
        for way in ways or ():
            if way not in there:
                raise DpfedError(
                    f"--way {way!r} is not measured on this device: choose from {', '.join(there)}"
                )
    found: list[Comparison] = []
    for name in wanted:
        found.append(compare(known[name], where, repeats, only=ways or None))
        for line in lines(found[-1]):
            print(line, flush=True)
    figures: dict[str, Any] = plain(found, where)
    print(
        f"on {figures['device']}; {', '.join(f'{k} {v}' for k, v in figures['versions'].items())}"
    )
    print(OTHERS)
    if out is not None:
        try:
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DpfedError(f"{out} cannot be written: {error.strerror or error}") from None
    if as_json:
        print(json.dumps(figures))


def lines(comparison: Any) -> list[str]:
    """A small table: each way's time, and how many times the private step's it is."""
    shown = [
        f"{comparison.case}: {comparison.clients} clients x {comparison.batch} records, one local step"
    ]
    for way in comparison.ways:
        if way.milliseconds is None:
            shown.append(f"  {way.way:22} -  {way.failed}")
            continue
        ratio = comparison.ratio(way.way, "private")
        times = "" if ratio is None else f"{ratio:6.2f} x the private step"
        peak = "" if way.peak is None else f"   peak {way.peak:.1f} GiB"
        processor = comparison.processor_ratio(way.way, "private")
        spent = (
            "" if processor is None else f"   CPU time {way.processor:9.1f} ms {processor:6.2f} x"
        )
        shown.append(f"  {way.way:22} {way.milliseconds:9.1f} ms {times}{peak}{spent}")
    return shown

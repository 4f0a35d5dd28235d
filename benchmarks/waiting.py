"""How much of a round a GPU waits in: rounds of a real `dpfed run`, first by the clock, then under torch's profiler.

What is not kernels and copies is pauses. Long ones are those in which the GPU waits for the host (sampling, ledger, checkpoints,
logging); short ones are between kernels, also of one CUDA graph. The profile does not tell whose fault a short one is, so pauses are
printed by how long they are, and the whole of them is the clock less the work.
Run: python benchmarks/waiting.py my.toml --set data.path=... [--out FOLDER]; needs a GPU. The run has 56 rounds and one evaluation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpfed.config import load
from dpfed.engine import rounds
from dpfed.engine.run import run
from dpfed.errors import DpfedError
from dpfed.registry import registry

CLOCK, PROFILED, ROUNDS = (10, 40), (45, 55), 56  # rounds [first, last) by the clock, and under the profiler
PAUSES = (3, 10, 100)  # microseconds

Span = tuple[float, float]


def pauses(spans: Sequence[Span]) -> tuple[float, list[float]]:
    """(microseconds in which any kernel runs, the pauses between them), of (start, end) of each kernel."""
    busy, end, found = 0.0, None, []
    for start, stop in sorted(spans):
        if end is None or start > end:
            found += [] if end is None else [start - end]
            busy, end = busy + stop - start, stop
        elif stop > end:
            busy, end = busy + stop - end, stop
    return busy, found


def lines(spans: Sequence[Span], profiled: int, clock: float, slower: float) -> list[str]:
    """What is printed. `profiled`: rounds that the spans are of; `clock` and `slower`: milliseconds of a round without the
    profiler and with it, whose pauses are a share of the latter."""
    busy, found = pauses(spans)
    out = [
        f"a round by the clock           {clock:7.2f} ms, {slower:.2f} under the profiler",
        f"kernels and copies of a round  {busy / profiled / 1e3:7.2f} ms in {len(spans) / profiled:.0f}",
    ]
    for least in PAUSES:
        long = [pause for pause in found if pause > least]
        total = sum(long) / profiled / 1e3
        out.append(
            f"pauses longer than {least:3} us      {total:7.2f} ms, {100 * total / slower:.1f} %, {len(long) / profiled:.1f} a round"
        )
    return out


class Watch:
    """In place of `rounds.choose`, which opens each round."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._choose = rounds.choose

    def __call__(self, job: Any, t: int, able: Any) -> list[int]:
        if t in (*CLOCK, *PROFILED):
            torch.cuda.synchronize()
            self.at[t] = time.perf_counter()
        if t == PROFILED[0]:
            self.profiler.start()
        if t == PROFILED[1]:
            self.profiler.stop()
        return self._choose(job, t, able)

    def lines(self) -> list[str]:
        on_gpu = [
            event for event in self.profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        spans = [(event.time_range.start, event.time_range.end) for event in on_gpu]
        clock, slower = ((self.at[b] - self.at[a]) / (b - a) * 1e3 for a, b in (CLOCK, PROFILED))
        return lines(spans, PROFILED[1] - PROFILED[0], clock, slower)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise DpfedError("there is no GPU here, and a CPU does not wait for the host")
    fixed = [f"run.rounds={ROUNDS}", f"run.eval_every={ROUNDS}", "run.device=cuda"]
    config = load(args.config, [*args.set, *fixed], registry())
    rounds.choose = watch = Watch()
    with tempfile.TemporaryDirectory() as scratch:
        run(config, args.out or Path(scratch) / "run")
    print(torch.cuda.get_device_name(0))
    print("\n".join(watch.lines()))


if __name__ == "__main__":
    try:
        main()
    except DpfedError as error:
        print(f"waiting: {error}", file=sys.stderr)
        sys.exit(2)

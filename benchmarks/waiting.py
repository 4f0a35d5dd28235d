"""Measure the share of a round in which a GPU waits, in a real `dpfed run` of 56 rounds.

    python benchmarks/waiting.py my.toml --set data.path=... [--out FOLDER] [--trace FILE.json.gz]

Some rounds are timed by the clock, others under torch's profiler. A pause is the time between two
kernels or copies. One launch of a CUDA graph starts many kernels: pauses inside a launch belong to
the GPU, and no host can shorten them. In pauses between launches the host works: sampling, ledger,
checkpoints, logging, launching. Kernels of one launch have one correlation id. It needs a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.training import round_loop
from dpfed.training.run import run

# Rounds [first, last) that are timed by the clock, and under the profiler.
CLOCK = (10, 40)
PROFILED = (45, 55)
ROUNDS = 56
# Lengths of pauses in microseconds, which are counted separately.
PAUSES = (3, 10, 100)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Kernel(NamedTuple):
    """A kernel or a copy; times in microseconds."""

    start: float
    end: float
    launch: int


class Pause(NamedTuple):
    """Time without work on the GPU; `outside` if it is between two launches."""

    length: float
    outside: bool


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """Return the kernels and copies of a profile that torch has exported."""
    found = [event for event in trace["traceEvents"] if event.get("cat") in ON_GPU]
    return [Kernel(e["ts"], e["ts"] + e["dur"], int(e["args"]["correlation"])) for e in found]


def pauses(kernels: Sequence[Kernel]) -> tuple[float, list[Pause]]:
    """Return the microseconds in which a kernel runs, and the pauses between kernels."""
    found: list[Pause] = []
    busy = 0.0
    last: Kernel | None = None
    for kernel in sorted(kernels):
        if last is not None and kernel.end <= last.end:
            continue
        start = kernel.start
        if last is not None:
            start = max(start, last.end)
            if kernel.start > last.end:
                found.append(Pause(kernel.start - last.end, kernel.launch != last.launch))
        busy += kernel.end - start
        last = kernel
    return busy, found


def lines(kernels: Sequence[Kernel], profiled: int, clock: float, slower: float) -> list[str]:
    """Return the lines of the report.

    profiled  number of rounds that the kernels belong to
    clock     milliseconds of a round without the profiler
    slower    milliseconds of a round with it

    Pauses are measured under the profiler, which lengthens some, as a share of a round without it.
    """
    busy, found = pauses(kernels)
    launches = len({kernel.launch for kernel in kernels})
    kinds = {
        "outside of launches": [p.length for p in found if p.outside],
        "inside of launches": [p.length for p in found if not p.outside],
    }
    kinds |= {
        f"longer than {least} us": [p.length for p in found if p.length > least] for least in PAUSES
    }
    out = [
        f"a round by the clock            {clock:7.2f} ms, {slower:.2f} under the profiler",
        f"kernels and copies of a round   {busy / profiled / 1e3:7.2f} ms "
        f"in {len(kernels) / profiled:.0f}, by {launches / profiled:.0f} launches",
    ]
    for name, some in kinds.items():
        total = sum(some) / profiled / 1e3
        share = 100 * total / clock
        count = len(some) / profiled
        out.append(f"pauses {name:24} {total:7.2f} ms, {share:.1f} %, {count:.1f} a round")
    return out


class Watch:
    """A replacement of `round_loop.choose`, which is called at the start of each round."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._choose = round_loop.choose

    def __call__(self, job: Any, t: int, able: Any, requests: Any) -> list[int]:
        if t == PROFILED[0]:
            torch.cuda.synchronize()
            self.profiler.start()
        if t in (*CLOCK, *PROFILED):
            torch.cuda.synchronize()
            self.at[t] = time.perf_counter()
        if t == PROFILED[1]:
            self.profiler.stop()
        return self._choose(job, t, able, requests)

    def lines(self, trace: Path) -> list[str]:
        self.profiler.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            kernels = kernels_of(json.load(file))
        clock, slower = ((self.at[b] - self.at[a]) / (b - a) * 1e3 for a, b in (CLOCK, PROFILED))
        return lines(kernels, PROFILED[1] - PROFILED[0], clock, slower)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="folder of the run, if it is to be kept")
    parser.add_argument(
        "--trace", type=Path, help="file of the profile, if it is to be kept: *.json.gz"
    )
    args = parser.parse_args()
    if args.trace is not None and args.trace.suffix != ".gz":
        raise DpfedError(f"--trace {args.trace}: give it a name that ends with .json.gz")
    if not torch.cuda.is_available():
        raise DpfedError("there is no GPU here, and a CPU does not wait for the host")
    fixed = [f"run.rounds={ROUNDS}", f"run.eval_every={ROUNDS}", "run.device=cuda"]
    config = load(args.config, [*args.set, *fixed], registry())
    round_loop.choose = watch = Watch()
    with tempfile.TemporaryDirectory() as scratch:
        run(config, args.out or Path(scratch) / "run")
        said = watch.lines(args.trace or Path(scratch) / "trace.json.gz")
    print("\n".join([torch.cuda.get_device_name(0), *said]))


if __name__ == "__main__":
    try:
        main()
    except DpfedError as error:
        print(f"waiting: {error}", file=sys.stderr)
        sys.exit(2)

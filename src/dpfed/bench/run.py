"""Time every implementation of a case, and compare them by ratios of their times.

In the code, an implementation is called a `way`. Ratios depend less on the machine than times do.
On a CPU the implementations take turns step by step, so that other load on the machine disturbs all
of them equally. On a GPU they are measured one after another, so that each can use the whole
memory.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from statistics import median
from typing import Any

import torch

from dpfed.bench.cases import Case
from dpfed.bench.peak_memory import peak_bytes
from dpfed.bench.steps import Step, captured, one_by_one, opacus, private, union
from dpfed.privacy.fixed_shape_sum import slots_for

INSTALL = {
    "opacus": "pip install 'opacus>=1.6,<1.7'",
    "opake": "pip install 'opake[transformers]>=0.16,<0.17'",
}
OTHERS = (
    "pfl and Flower need environments of their own: benchmarks/peers/run.py names the commands and "
    "measures whole rounds"
)
Way = tuple[str, Callable[[], Step]]


@dataclass(frozen=True)
class Measured:
    """The time and memory of one implementation of a training step.

    way           name of the implementation
    milliseconds  median wall-clock time of a step; None if the implementation failed
    peak          largest allocated memory in GiB (GPU only)
    setup         seconds from the start of the preparation to the first timed step
    failed        the reason why there is no timing, or None
    processor     median processor time of a step in milliseconds (CPU only)
    created       largest memory in MiB of the tensors that a step creates (CPU only)
    """

    way: str
    milliseconds: float | None
    peak: float | None = None
    setup: float | None = None
    failed: str | None = None
    processor: float | None = None
    created: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The timings of one case (a model with its clients), one for each implementation of a step.

    The other fields repeat the settings of the case, as in `Case`.
    """

    case: str
    clients: int
    batch: int
    ways: tuple[Measured, ...]
    checkpoint: bool = False
    quantize: str = "none"

    def of(self, way: str) -> Measured | None:
        return next((m for m in self.ways if m.way == way), None)

    def records_per_second(self, way: str) -> float | None:
        milliseconds = getattr(self.of(way), "milliseconds", None)
        return 1e3 * self.clients * self.batch / milliseconds if milliseconds else None

    def ratio(self, one: str, other: str) -> float | None:
        """Return the wall-clock time of the implementation `one`, divided by that of `other`."""
        return self._ratio(one, other, "milliseconds")

    def processor_ratio(self, one: str, other: str) -> float | None:
        """Return the processor time of the implementation `one`, divided by that of `other`.

        Other load on the machine changes this ratio less than the ratio of wall-clock times.
        """
        return self._ratio(one, other, "processor")

    def _ratio(self, one: str, other: str, time_of: str) -> float | None:
        a, b = (getattr(self.of(way), time_of, None) for way in (one, other))
        return a / b if a and b else None


def measure(
    way: str, make: Callable[[], Step], device: torch.device, repeats: int, warm: int
) -> Measured:
    """Time one implementation of a training step alone, then free the memory that it has allocated.

    way      name of the implementation
    make     prepares the implementation and returns a function that runs one step
    repeats  number of timed steps
    warm     number of untimed steps before the timed steps
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        step, setup = _prepared(make, warm, cuda)
        times = [_timed(step, cuda)[0] for _ in range(repeats)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        return Measured(way, median(times), peak, setup)
    except Exception as error:
        # Record the failure as the result of this implementation, so that the others are still
        # measured.
        return failure(way, error)
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()


def measure_in_turn(ways: Sequence[Way], repeats: int, warm: int) -> tuple[Measured, ...]:
    """Time all implementations in turns: in each turn, every implementation runs one step.

    The order rotates from turn to turn, so that each implementation is first equally often.

    repeats  number of timed turns
    warm     number of untimed steps of each implementation before the first turn
    """
    ready: dict[str, tuple[Step, float]] = {}
    found: dict[str, Measured] = {}
    for name, make in ways:
        try:
            ready[name] = _prepared(make, warm, cuda=False)
        except Exception as error:
            found[name] = failure(name, error)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    order = list(ready)
    for turn in range(repeats):
        first = turn % max(len(order), 1)
        for name in order[first:] + order[:first]:
            times[name].append(_timed(ready[name][0], cuda=False))
    for name, (step, setup) in ready.items():
        clock, processor = map(median, zip(*times[name], strict=True))
        created = peak_bytes(step) / 2**20
        found[name] = Measured(name, clock, None, setup, None, processor, created)
    return tuple(found[name] for name, _ in ways)


def _prepared(make: Callable[[], Step], warm: int, cuda: bool) -> tuple[Step, float]:
    """Prepare an implementation by `make` and run its step `warm` times without timing the steps.

    Return the step, and the seconds that preparation and these steps took.
    """
    started = time.perf_counter()
    step = make()
    for _ in range(warm):
        step()
    _wait(cuda)
    return step, time.perf_counter() - started


def _timed(step: Step, cuda: bool) -> tuple[float, float]:
    """Run one step and return its wall-clock time and its processor time, in milliseconds."""
    clock = time.perf_counter()
    processor = time.process_time()
    step()
    _wait(cuda)
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - processor)


def failure(way: str, error: Exception) -> Measured:
    """Return the result of an implementation whose step failed, with the error in one line.

    If a package is missing, the line gives the command that installs it.
    """
    if isinstance(error, ImportError) and error.name:
        name = error.name.partition(".")[0]
        command = INSTALL.get(name, f"pip install {name}")
        return Measured(way, None, failed=f"not installed: {command}")
    said = (str(error).splitlines() or [""])[0][:120]
    return Measured(way, None, failed=f"{type(error).__name__}: {said}")


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def ways_of(case: Case, device: torch.device) -> list[Way]:
    """Return the name and the preparing function of every implementation of a case.

    On a GPU the implementations are compiled and compute in bfloat16. On a CPU they are uncompiled
    and compute in float32.
    """
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    padded = slots_for(case.union)
    on_gpu: list[Way] = [
        ("union, captured", lambda: captured(union(case, device, dtype, True))),
        ("private, not compiled", lambda: private(case, device, dtype, False, case.union)),
    ]
    return [
        ("union", lambda: union(case, device, dtype, cuda)),
        ("private", lambda: private(case, device, dtype, cuda, case.union)),
        (f"private, {padded} slots", lambda: private(case, device, dtype, cuda, padded)),
        *(on_gpu if cuda else []),
        ("one by one", lambda: one_by_one(case, device, dtype)),
        ("opacus", lambda: opacus(case, device, dtype)),
    ]


def compare(
    case: Case,
    device: torch.device,
    repeats: int = 15,
    warm: int = 4,
    only: Sequence[str] | None = None,
) -> Comparison:
    """Time all implementations of a case, or only those whose names are in `only`."""
    ways = [way for way in ways_of(case, device) if only is None or way[0] in only]
    with warnings.catch_warnings():
        # Ignore a harmless warning that Opacus gives if the first layer of a model is frozen.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        if device.type == "cuda":
            found = tuple(measure(name, make, device, repeats, warm) for name, make in ways)
        else:
            found = measure_in_turn(ways, repeats, warm)
    return Comparison(case.model, case.clients, case.batch, found, case.checkpoint, case.quantize)


def plain(comparisons: Sequence[Comparison], device: torch.device) -> dict[str, Any]:
    """Return the comparisons as an object for JSON, with the device and the package versions."""
    from dpfed.training.run_folder.folder import versions

    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    peers = {peer: found for peer in INSTALL if (found := version_of(peer))}
    return {
        "device": name,
        "versions": {**versions(), **peers},
        "others": OTHERS,
        "cases": [entry(c) for c in comparisons],
    }


def entry(found: Comparison) -> dict[str, Any]:
    """Return one comparison as an object for JSON.

    It also has the ratio of each time to the time of the private step, and the records per second.
    """
    ratios = {
        measured.way: {
            "clock": found.ratio(measured.way, "private"),
            "processor": found.processor_ratio(measured.way, "private"),
        }
        for measured in found.ways
    }
    speeds = {way.way: found.records_per_second(way.way) for way in found.ways}
    return {**asdict(found), "times_private": ratios, "records_per_second": speeds}


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""Times the competitors side by side and prints ratios. Seconds are those of one machine; ratios are what travels.

On a CPU all ways take a step in turn, so that whatever else the machine has to do disturbs all alike. On a GPU one way is
measured after another, because each is to have the memory for itself.
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
from dpfed.bench.steps import Step, captured, one_by_one, opacus, private, union
from dpfed.privacy.fixed_shape_sum import slots_for

INSTALL = {"opacus": "pip install 'opacus>=1.6,<1.7'"}
OTHERS = "pfl and Flower need environments of their own: benchmarks/peers/run.py names the commands and measures whole rounds"
Way = tuple[str, Callable[[], Step]]


@dataclass(frozen=True)
class Measured:
    """Medians of a step's milliseconds on the clock and (CPU only) of the processor, GiB at its peak (GPU only), seconds
    until the first step, or why there is none."""

    way: str
    milliseconds: float | None
    peak: float | None = None
    setup: float | None = None
    failed: str | None = None
    processor: float | None = None


@dataclass(frozen=True)
class Comparison:
    case: str
    clients: int
    batch: int
    ways: tuple[Measured, ...]

    def of(self, way: str) -> Measured | None:
        return next((m for m in self.ways if m.way == way), None)

    def ratio(self, one: str, other: str) -> float | None:
        """How much longer `one` takes than `other`."""
        return _over(self.of(one), self.of(other), lambda m: m.milliseconds)

    def processor_ratio(self, one: str, other: str) -> float | None:
        """The same in seconds of the processor, which other people's work on the machine disturbs less."""
        return _over(self.of(one), self.of(other), lambda m: m.processor)


def _over(
    one: Measured | None, other: Measured | None, figure: Callable[[Measured], float | None]
) -> float | None:
    a, b = (None if m is None else figure(m) for m in (one, other))
    return a / b if a and b else None


def measure(
    way: str, make: Callable[[], Step], device: torch.device, repeats: int, warm: int
) -> Measured:
    """Everything a way has allocated is freed before the next begins."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        step = make()
        for _ in range(warm):
            step()
        _wait(cuda)
        setup = time.perf_counter() - started
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            step()
            _wait(cuda)
            times.append(1e3 * (time.perf_counter() - begun))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        return Measured(way, median(times), peak, setup)
    except Exception as error:  # a peer that cannot do the case is a result
        return failure(way, error)
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()


def measure_in_turn(ways: Sequence[Way], repeats: int, warm: int) -> tuple[Measured, ...]:
    """A step of each way, then a step of each way again. Who begins changes, so that nobody always follows the same one."""
    ready: dict[str, Step] = {}
    setup: dict[str, float] = {}
    failed: dict[str, Measured] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in ways}
    for name, make in ways:
        started = time.perf_counter()
        try:
            step = make()
            for _ in range(warm):
                step()
        except Exception as error:
            failed[name] = failure(name, error)
            continue
        ready[name], setup[name] = step, time.perf_counter() - started
    order = list(ready)
    for turn in range(repeats):
        first = turn % max(len(order), 1)
        for name in order[first:] + order[:first]:
            clock, processor = time.perf_counter(), time.process_time()
            ready[name]()
            times[name].append(
                (1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - processor))
            )

    def found(name: str) -> Measured:
        clock, processor = (median(column) for column in zip(*times[name], strict=True))
        return Measured(name, clock, setup=setup[name], processor=processor)

    return tuple(failed[name] if name in failed else found(name) for name, _ in ways)


def failure(way: str, error: Exception) -> Measured:
    """Why there is no figure, in one line; for what is only missing, the command that brings it."""
    if isinstance(error, ImportError) and error.name:
        name = error.name.partition(".")[0]
        return Measured(
            way, None, failed=f"not installed: {INSTALL.get(name, f'pip install {name}')}"
        )
    said = (str(error).splitlines() or [""])[0][:120]
    return Measured(way, None, failed=f"{type(error).__name__}: {said}")


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def ways_of(case: Case, device: torch.device) -> list[Way]:
    """All ways to do the case. A GPU computes in bfloat16 and compiled, a CPU in float32 and not."""
    cuda = device.type == "cuda"
    dtype, padded = (torch.bfloat16 if cuda else torch.float32), slots_for(case.union)
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
    """One case, all ways or only those."""
    ways = [way for way in ways_of(case, device) if only is None or way[0] in only]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Full backward hook is firing"
        )  # Opacus, of every frozen first layer
        if device.type == "cuda":
            found = tuple(measure(name, make, device, repeats, warm) for name, make in ways)
        else:
            found = measure_in_turn(ways, repeats, warm)
    return Comparison(case.model, case.clients, case.batch, found)


def plain(comparisons: Sequence[Comparison], device: torch.device) -> dict[str, Any]:
    """For JSON: figures with the machine and the versions that made them."""
    from dpfed.training.run_folder.folder import versions

    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    peers = {peer: found for peer in INSTALL if (found := version_of(peer))}
    return {
        "device": name,
        "versions": {**versions(), **peers},
        "others": OTHERS,
        "cases": [entry(c) for c in comparisons],
    }


def entry(found: Comparison) -> dict[str, Any]:
    """A case with what its ratios are: each way's milliseconds over those of the private step."""
    ratios = {w.way: {"clock": found.ratio(w.way, "private"), "processor": found.processor_ratio(w.way, "private")}
              for w in found.ways}  # fmt: skip
    return {**asdict(found), "times_private": ratios}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""Times the competitors side by side and prints ratios. Seconds are those of one machine; ratios are what travels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dpfed.bench.cases import Case
from dpfed.bench.steps import Step, one_by_one, opacus, private, union
from dpfed.privacy.fixed import slots_for


@dataclass(frozen=True)
class Measured:
    """Median milliseconds of a step, GiB at its peak (GPU only), seconds until the first step, or why there is none."""

    way: str
    milliseconds: float | None
    peak: float | None = None
    setup: float | None = None
    failed: str | None = None


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
        a, b = self.of(one), self.of(other)
        if a is None or b is None or a.milliseconds is None or b.milliseconds is None:
            return None
        return a.milliseconds / b.milliseconds


def measure(way: str, make: Callable[[], Step], device: torch.device, repeats: int, warm: int) -> Measured:
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
        return Measured(way, sorted(times)[len(times) // 2], peak, setup)
    except ImportError as error:
        return Measured(way, None, failed=f"not installed: pip install {error.name}")
    except Exception as error:  # a peer that cannot do the case is a result
        return Measured(way, None, failed=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def compare(case: Case, device: torch.device, repeats: int = 15, warm: int = 4) -> Comparison:
    """One case, all ways. A GPU computes in bfloat16 and compiled, a CPU in float32 and not."""
    cuda = device.type == "cuda"
    dtype, padded = (torch.bfloat16 if cuda else torch.float32), slots_for(case.union)
    ways: Sequence[tuple[str, Callable[[], Step]]] = (
        ("union", lambda: union(case, device, dtype, cuda)),
        ("private", lambda: private(case, device, dtype, cuda, case.union)),
        (f"private, {padded} slots", lambda: private(case, device, dtype, cuda, padded)),
        ("one by one", lambda: one_by_one(case, device, dtype)),
        ("opacus", lambda: opacus(case, device, dtype)),
    )
    found = tuple(measure(name, make, device, repeats, warm) for name, make in ways)
    return Comparison(case.model, case.clients, case.batch, found)


def plain(comparisons: Sequence[Comparison], device: torch.device) -> dict[str, Any]:
    """For JSON: figures with the machine and the versions that made them."""
    from dpfed.engine.folder import versions

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "versions": versions(), "cases": [asdict(c) for c in comparisons]}

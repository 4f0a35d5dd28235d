"""A long run of a tiny configuration: memory, open files and time per round must not grow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from callback_case import Watcher

from dpfed.config import load
from dpfed.registry import registry
from dpfed.training.rounds import Round
from dpfed.training.run import run

ROUNDS = int(os.environ.get("DPFED_SOAK_ROUNDS", "2000"))
# Rounds at both ends over which time is averaged.
STRETCH = 200
KEYS = [
    "model.name=linear",
    "run.local_steps=1",
    "run.participation=0.3",
    "run.device=cpu",
    "run.threads=1",
    "privacy.sigma=3.0",
    "privacy.batch=4",
    "run.eval_every=50",
    "algorithm.name=dp-scaffold",
    "algorithm.lr=0.05",
]


def resident_mib() -> float:
    """Return the memory that this process holds, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_grows_over_many_rounds(tmp_path: Path) -> None:
    seen: dict[int, tuple[float, int, float]] = {}

    def observe(round: Round) -> None:
        if round.t in (0, STRETCH, ROUNDS - STRETCH, ROUNDS):
            seen[round.t] = (resident_mib(), open_files(), time.perf_counter())

    run(
        load("digits", [*KEYS, f"run.rounds={ROUNDS}"], registry()),
        tmp_path / "run",
        callbacks=[Watcher(on_round=observe)],
    )
    memory, files, at = seen[STRETCH]
    last_memory, last_files, last_at = seen[ROUNDS]
    early = (at - seen[0][2]) / STRETCH
    late = (last_at - seen[ROUNDS - STRETCH][2]) / STRETCH
    print(f"memory {memory:.1f} -> {last_memory:.1f} MiB, files {files} -> {last_files}")
    print(f"{1e3 * early:.2f} -> {1e3 * late:.2f} ms per round")
    assert last_memory <= memory * 1.1 + 20
    assert last_files <= files
    assert late <= 2 * early

"""A long run of a tiny configuration: memory, open files and time per round must not grow.

    python scripts/soak.py --rounds 2000

Prints them after the first stretch and at the end, and fails when one has grown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from dpfed.config import load
from dpfed.registry import registry
from dpfed.training.round_loop import Round
from dpfed.training.run import run

STRETCH = 200  # rounds at both ends over which time is averaged
KEYS = [
    "model.name=linear", "run.local_steps=1", "run.participation=0.3", "run.device=cpu", "run.threads=1",
    "privacy.sigma=3.0", "privacy.batch=4", "run.eval_every=50", "algorithm.name=dp-scaffold", "algorithm.lr=0.05",
]  # fmt: skip


def resident() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = max(2 * STRETCH, parser.parse_args().rounds)
    torch.set_num_threads(1)
    seen: dict[int, tuple[float, int, float]] = {}

    def observe(round: Round) -> None:
        if round.t in (0, STRETCH, rounds - STRETCH, rounds):
            seen[round.t] = (resident(), open_files(), time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        run(
            load("digits", [*KEYS, f"run.rounds={rounds}"], registry()),
            Path(folder) / "run",
            observe=observe,
        )
    first, last = seen[STRETCH], seen[rounds]
    early = (first[2] - seen[0][2]) / STRETCH
    late = (last[2] - seen[rounds - STRETCH][2]) / STRETCH
    print(f"{'':16}{'after ' + str(STRETCH):>14}{'after ' + str(rounds):>14}")
    print(f"{'memory, MiB':16}{first[0]:14.1f}{last[0]:14.1f}")
    print(f"{'open files':16}{first[1]:14d}{last[1]:14d}")
    print(f"{'ms per round':16}{1e3 * early:14.2f}{1e3 * late:14.2f}")
    grown = last[0] > first[0] * 1.1 + 20 or last[1] > first[1] or late > 2 * early
    print("GROWN" if grown else "flat")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())

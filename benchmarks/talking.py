"""Measure the communication between the processes of one run in a round, without training.

    python benchmarks/talking.py [--processes 2] [--cuda] [P ...]

A round of dp-fedavg: header, cohort, broadcast of P numbers, length, all-reduce of P numbers. The
time is the median of 20, over gloo on this machine, or nccl with --cuda (one GPU for each
process).
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
import torch
import torch.multiprocessing as mp

from dpfed.training.backends.torchrun import Group

ROUNDS = 20
COHORT = 50
WARM_UP = 3


def process(rank: int, processes: int, cuda: bool, sizes: list[int], meet: str) -> None:
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda" if cuda else "cpu")
    group = Group(rank, processes, 60, "cpu:gloo,cuda:nccl" if cuda else "gloo", f"file://{meet}")
    for size in sizes:
        state = torch.ones(4 * size, dtype=torch.uint8, device=device)
        message = torch.ones(size, device=device)
        seconds = []
        for _ in range(WARM_UP + ROUNDS):
            start = time.perf_counter()
            group.header(2, 1, COHORT, 0)
            group.broadcast(torch.zeros(COHORT, dtype=torch.int64, device=device))
            group.broadcast(state)
            group.header(size)
            group.total(message)
            float(message[0])
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            milliseconds = 1e3 * float(np.median(seconds[WARM_UP:]))
            row = f"{processes:9d} {size:12,d} {8 * size / 1e6:9.1f} {milliseconds:9.1f}"
            print(row, flush=True)
    if rank == 0:
        group.close()
    else:
        group.header()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int, default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cuda", action="store_true")
    given = parser.parse_args()
    print(f"{'processes':>9} {'P':>12} {'MB':>9} {'ms':>9}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.processes, given.cuda, given.sizes, f"{folder}/meet")
        mp.spawn(process, arguments, nprocs=given.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

"""What processes of one run say to one another in a round, without any client's work: seconds for P trainable numbers.

A round of dp-fedavg: header, cohort, broadcast of P numbers, length, all-reduce of P numbers; median of 20, over gloo on this
machine, or nccl with --cuda (one GPU for each process). Run: python benchmarks/talking.py [--processes 2] [--cuda] [P ...]
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
import torch
import torch.multiprocessing as mp

from dpfed.training.backends.torchrun import Group

ROUNDS, COHORT = 20, 50


def one(rank: int, processes: int, cuda: bool, sizes: list[int], meet: str) -> None:
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda" if cuda else "cpu")
    group = Group(rank, processes, 60, "cpu:gloo,cuda:nccl" if cuda else "gloo", f"file://{meet}")
    for size in sizes:
        state, message = (
            torch.ones(4 * size, dtype=torch.uint8, device=device),
            torch.ones(size, device=device),
        )
        seconds = []
        for _ in range(ROUNDS + 3):
            start = time.perf_counter()
            group.header(2, 1, COHORT, 0)
            group.broadcast(torch.zeros(COHORT, dtype=torch.int64, device=device))
            group.broadcast(state)
            group.header(size)
            group.total(message)
            float(message[0])
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            print(
                f"{processes:9d} {size:12,d} {8 * size / 1e6:9.1f} {1e3 * float(np.median(seconds[3:])):9.1f}",
                flush=True,
            )
    group.close() if rank == 0 else group.header()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int, default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cuda", action="store_true")
    given = parser.parse_args()
    print(f"{'processes':>9} {'P':>12} {'MB':>9} {'ms':>9}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.processes, given.cuda, given.sizes, f"{folder}/meet")
        mp.spawn(one, arguments, nprocs=given.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

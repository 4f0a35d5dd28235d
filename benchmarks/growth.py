"""What a run costs beyond its clients' work as the number of clients grows: seconds of start-up and of a round.

50 clients a round, one local step, a linear model of 8 features, 2 records a client, sigma 1. Start-up is everything
before round 1: dealing records, plan, statement, model, ledger, first state. A round is everything in the loop, with ledger
and checkpoint, median of 20; the accountant's figure is asked for once, at the end, and stands in its own column. The best of three tries.
Run: python benchmarks/growth.py [--partition iid] [number of clients ...]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from dpfed.config import build
from dpfed.data.tables import Source, Table
from dpfed.privacy.accounting import pld
from dpfed.registry import registry
from dpfed.training.callbacks.base import Callback
from dpfed.training.rounds import Round
from dpfed.training.run import run

COHORT, ROUNDS, RECORDS = 50, 20, 2


def source_of(clients: int) -> Source:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RECORDS * clients + 100, 8)).astype(np.float32)
    y = (x @ rng.normal(size=(8, 4))).argmax(1)
    names = ("a", "b", "c", "d")
    return Source(
        Table({"features": x[100:]}, y[100:]),
        Table({"features": x[:100]}, y[:100]),
        names,
        "features",
    )


def measure(clients: int, partition: str, folder: Path) -> tuple[float, float, float]:
    """Seconds of start-up, of a round, and of the last round with its evaluation and epsilon."""
    raw = {
        "data": {"clients": clients, "partition": partition},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.01},
        "privacy": {"sigma": 1.0, "clip": 0.5, "rate": 0.5},
        "run": {
            "rounds": ROUNDS + 1,
            "local_steps": 1,
            "participation": COHORT / clients,
            "device": "cpu",
            "eval_every": ROUNDS + 1,
        },
    }
    for remembered in (pld.compose, pld.epsilon_of_terms, pld._rdp_step):
        remembered.cache_clear()  # every try pays the accountant
    config, source, seconds = build(raw, registry()), source_of(clients), []
    start = time.perf_counter()

    class Observer(Callback):
        def on_round(self, round: Round) -> None:
            seconds.append(time.perf_counter() - start)

    run(config, folder / str(clients), source=source, callbacks=[Observer()])
    steps = np.diff(seconds)
    return seconds[0], float(np.median(steps[:-1])), float(steps[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", nargs="*", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--partition", default="iid")
    given = parser.parse_args()
    print(
        f"{'clients':>9} {'start-up s':>11} {'round s':>9} {'round with epsilon s':>21} {'peak MiB':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        measure(COHORT, given.partition, Path(folder))  # imports and caches
        for clients in given.clients:
            tries = [measure(clients, given.partition, Path(folder) / f"try-{i}") for i in range(3)]
            started, each, last = (min(figures) for figures in zip(*tries, strict=True))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{clients:9d} {started:11.2f} {each:9.4f} {last:21.3f} {peak:9.0f}")


if __name__ == "__main__":
    main()

"""Measure start-up and rounds as the number of clients grows, with almost no work of the clients.

    python benchmarks/growth.py [--partition iid] [number of clients ...]

50 clients a round, one local step, a linear model of 8 features, 2 records a client, sigma 1.
Start-up is everything before round 1: partition, plan, statement, model, ledger, first state. A
round includes ledger and checkpoint; its time is the median of 20. The last column has the round
in which epsilon is computed. Each figure is the best of three tries.
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

COHORT = 50
ROUNDS = 20
RECORDS = 2


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
    """Return the seconds of start-up, of a round, and of the last round with its epsilon."""
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
    # Clear the caches, so that every try includes the accountant.
    for cached in (pld.compose, pld.epsilon_of_terms, pld._rdp_step):
        cached.cache_clear()
    config = build(raw, registry())
    source = source_of(clients)
    seconds: list[float] = []
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
    heads = f"{'round s':>9} {'round with epsilon s':>21} {'peak MiB':>9}"
    print(f"{'clients':>9} {'start-up s':>11} {heads}")
    with tempfile.TemporaryDirectory() as folder:
        # The first run includes imports.
        measure(COHORT, given.partition, Path(folder))
        for clients in given.clients:
            tries = [measure(clients, given.partition, Path(folder) / f"try-{i}") for i in range(3)]
            started, each, last = (min(figures) for figures in zip(*tries, strict=True))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{clients:9d} {started:11.2f} {each:9.4f} {last:21.3f} {peak:9.0f}")


if __name__ == "__main__":
    main()

"""Measure the time for the epsilon of every client, and check the bounds against the exact PLD.

    python benchmarks/population.py [number of clients ...]

Sizes are log-uniform in 100..10,000, the rate is 16/size; 50 clients a round, 1,000 rounds, 20
local steps, sigma 1, delta 1e-5.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from dpfed.privacy.accounting.pld import pld_epsilon
from dpfed.privacy.accounting.population import Population, population_epsilon
from dpfed.privacy.mechanism import Mechanism

COHORT = 50
ROUNDS = 1000
LOCAL_STEPS = 20
SIGMA = 1.0
DELTA = 1e-5


def setting(clients: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the rate and the number of rounds of each client; a round draws 50 of them."""
    rng = np.random.default_rng(seed)
    sizes = np.round(np.exp(rng.uniform(np.log(100), np.log(10_000), clients)))
    drawn = [rng.choice(clients, COHORT, replace=False) for _ in range(ROUNDS)]
    return 16 / sizes, np.bincount(np.concatenate(drawn), minlength=clients)


def excess(
    rates: np.ndarray, rounds: np.ndarray, bounds: np.ndarray, sample: int
) -> tuple[float, float]:
    """Return the smallest and largest relative excess over the exact PLD for random clients."""
    chosen = np.random.default_rng(1).choice(np.flatnonzero(rounds), sample, replace=False)
    exact = [
        pld_epsilon([(Mechanism("poisson", rates[i], SIGMA), LOCAL_STEPS * int(rounds[i]))], DELTA)
        for i in chosen
    ]
    ratio = bounds[chosen] / np.asarray(exact) - 1
    return float(ratio.min()), float(ratio.max())


def main(counts: list[int]) -> None:
    heads = f"{'max eps':>8} {'excess over exact PLD, 40 clients':>36}"
    print(f"{'clients':>9} {'seconds':>8} {'peak MiB':>9} {heads}")
    for clients in counts:
        rates, rounds = setting(clients)
        start = time.perf_counter()
        population = Population(rates, np.full(clients, SIGMA), rounds, LOCAL_STEPS)
        bounds = population_epsilon(population, DELTA)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        low, high = excess(rates, rounds, bounds, 40)
        kept = "kept" if low >= 0 and high <= 0.03 else "BROKEN"
        found = f"{bounds.max():8.3f} {low:17.2%} to {high:.2%}, promise {kept}"
        print(f"{clients:9d} {seconds:8.1f} {peak:9.0f} {found}")


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [1_000, 10_000, 100_000])

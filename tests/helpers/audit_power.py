"""Print how many canaries an audit of the digits job needs to find each broken build.

    python tests/helpers/audit_power.py

Each broken build is audited with three seeds, at confidence 0.999 for each bound. The table gives
the smallest number of canaries at which all three audits disprove the claim. The first column is
the bound of Steinke, Nasr and Jagielski ("Privacy Auditing with One (1) Training Run", 2023).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from broken_builds import BROKEN, audited_with
from scipy import stats

from dpfed.privacy.auditing.guesses import MAX_EPSILON, counted_guesses
from dpfed.training.auditing.audit import Bounds
from dpfed.training.auditing.canary_run import observe
from dpfed.training.auditing.setting import AuditSize, setting_of
from dpfed.training.job.job import Job

CONFIDENCE = 0.999
CANARIES = (20, 60, 120, 240)
SEEDS = 3


def earlier_bound(scores: np.ndarray, coins: np.ndarray, delta: float) -> float:
    """Return the lower bound on epsilon of Steinke and others, Theorem 5.2."""
    ranked = coins.reshape(-1)[np.argsort(scores.reshape(-1), kind="stable")]
    half = len(ranked) // 2
    # The bound was also computed from guesses of all coins.
    all_right = int(ranked[-half:].sum()) + half - int(ranked[:half].sum())
    counts = [*counted_guesses(scores, coins), (2 * half, all_right)]
    error = (1 - CONFIDENCE) / len(counts)
    low, high = 0.0, MAX_EPSILON
    while high - low > 1e-3:
        middle = (low + high) / 2
        if min(p_value(coins.size, *count, middle, delta) for count in counts) < error:
            low = middle
        else:
            high = middle
    return low


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    if correct == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, accuracy))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def disproved_by(job: Job, canaries: int) -> list[bool]:
    """Return for each bound on the released gradients if it exceeds the claim."""
    setting = setting_of(job)
    clients = np.arange(setting.plan.clients)
    found = observe(job, clients, setting, AuditSize(canaries // len(clients), 1))
    reports = Bounds(found.setting, CONFIDENCE).of_measurement(
        "oracle", found.gradients, found.coins
    )
    earlier = earlier_bound(found.gradients.scores, found.coins, setting.delta)
    return [earlier > reports[0].claimed, *(report.disproved for report in reports)]


def main() -> None:
    torch.set_num_threads(1)
    print("| broken build | Steinke and others | nothing | the accounted curve | Gaussian noise |")
    print("|---|---|---|---|---|")
    for name in list(BROKEN)[:8]:
        needed = ["none"] * 4
        for canaries in reversed(CANARIES):
            found = [
                audited_with(name, lambda job, n=canaries: disproved_by(job, n), seed)  # type: ignore[misc]
                for seed in range(SEEDS)
            ]
            every = np.all(found, axis=0)
            needed = [str(canaries) if e else n for e, n in zip(every, needed, strict=True)]
            if not every.any():
                break
        print(f"| {name} | {' | '.join(needed)} |", flush=True)


if __name__ == "__main__":
    main()

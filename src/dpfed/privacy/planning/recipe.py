"""The learning rate of DP-FedAdamW without tuning: a function of public numbers only.

With noise, second moments contain almost only noise, so one local step moves a number by
η/√κ times a standard normal number, and the alignment repeats the move 1/(1-γ) times. Over T·K
steps of S averaged clients, noise alone moves every trained number by about

    η/√κ · 1/(1-γ) · √(T·K/S)

The recipe chooses the η for which this is a constant: SPREAD_HEAD for a linear head, SPREAD_BODY
for anything else. Neither C, σ, B nor the number of weights appears, as the steps are divided by
the noise's standard deviation. docs/recipe.md has the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# The algorithm that the recipe is for.
METHOD = "dp-fedadamw"
# How far noise alone moves a weight in the whole run.
SPREAD_HEAD = 0.3
SPREAD_BODY = 0.12
# Weight of the direction of the last round, and decay of the average over rounds.
GAMMA = 0.9
AVERAGE = 0.95
# η/(1-γ) of a run without noise: the usual rates of Adam.
PLAIN_HEAD = 1e-2
PLAIN_BODY = 1e-3


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """The public numbers that the learning rate follows from.

    steps     local steps T·K of the run
    cohort    clients in each round, S
    gamma     weight γ of the global direction
    floor     floor κ of corrected second moments, in units of Φ; 1 without bias correction
    schedule  root mean square of η_t/η_0 over the rounds
    head      True if only a linear head is trained
    private   True if noise is added
    """

    steps: int
    cohort: int
    gamma: float
    floor: float
    schedule: float
    head: bool
    private: bool


def recipe(calibrated: bool = True) -> dict[str, dict[str, Any]]:
    """Return the recipe's keys as tables of a configuration with DP-FedAdamW.

    calibrated  True if the configuration has a target epsilon, from which the batch follows
    """
    tables: dict[str, dict[str, Any]] = {
        "algorithm": {"name": METHOD, "lr": "auto", "gamma": GAMMA},
        "privacy": {"clip_mode": "automatic", "clip": 1.0},
        "run": {"cohort_choice": "balanced", "lr_schedule": "constant", "average": AVERAGE},
    }
    if calibrated:
        tables["privacy"]["batch"] = "auto"
    return tables


def automatic_lr(facts: RecipeFacts) -> float:
    """Return the base learning rate η0, rounded to three digits."""
    # With γ = 1 the sum of all repeats is bounded by the number of steps only.
    damping = max(1 - facts.gamma, 1 / facts.steps)
    if not facts.private:
        return rounded(damping * (PLAIN_HEAD if facts.head else PLAIN_BODY))
    spread = SPREAD_HEAD if facts.head else SPREAD_BODY
    walk = math.sqrt(facts.steps / facts.cohort) * facts.schedule
    return rounded(spread * damping * math.sqrt(facts.floor) / walk)


def rounded(value: float) -> float:
    return float(f"{value:.3g}")

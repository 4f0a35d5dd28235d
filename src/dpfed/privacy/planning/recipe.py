"""The learning rate of DP-FedAdamW without tuning: a function of public numbers only.

With noise, second moments contain almost only noise. One local step therefore moves a weight by
η/√κ times a standard normal number, and the alignment repeats the move 1/(1-γ) times. Over T·K
steps of S averaged clients, noise alone moves every trained weight by about

    η/√κ · 1/(1-γ) · √(T·K/S)

The recipe chooses η so that this distance is a constant. The constant depends on the trained part:
weights with a large fan-in must move less, because a layer adds up their noise. In runs of a few
steps, weights move less than this constant. The formula does not contain C, σ or B, because steps
are divided by the standard deviation of the noise.
docs/recipe.md has the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["head", "adapter", "layers"]

# The algorithm of the recipe.
METHOD = "dp-fedadamw"
# Distance by which noise alone moves a weight in the whole run, by trained part. For other layers
# than heads and adapters, it is divided by the square root of the fan-in.
SPREAD_HEAD = 0.3
SPREAD_ADAPTER = 0.12
SPREAD_LAYER = 0.3
# Least value of √(T·K/S) times `schedule`. It limits the learning rate of short runs, because in a
# few steps a weight must not move as far as in many.
SHORTEST_WALK = 3.0
# Least value of 1-γ in the formula. Without this limit, γ = 1 would give a learning rate of 0.
LEAST_DAMPING = 0.01
# Weight of the direction of the last round, and decay of the average over rounds.
GAMMA = 0.9
AVERAGE = 0.95
# η/(1-γ) of a run without noise: the usual rates of Adam.
PLAIN_HEAD = 1e-2
PLAIN_BODY = 1e-3


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """The public numbers that determine the learning rate.

    steps     local steps T·K of the run
    cohort    clients in each round, S
    gamma     weight γ of the global direction
    floor     floor κ of corrected second moments, in units of Φ; 1 without bias correction
    schedule  root mean square of η_t/η_0 over the rounds
    part      what is trained: "head", "adapter", or "layers" for other modules
    fan_in    mean fan-in of the trained matrices; it counts for "layers" only
    private   True if noise is added
    """

    steps: int
    cohort: int
    gamma: float
    floor: float
    schedule: float
    part: Part
    fan_in: float
    private: bool

    @property
    def spread(self) -> float:
        """The distance by which noise alone moves a weight in the whole run."""
        if self.part == "head":
            return SPREAD_HEAD
        return SPREAD_ADAPTER if self.part == "adapter" else SPREAD_LAYER / math.sqrt(self.fan_in)


def recipe(calibrated: bool = True) -> dict[str, dict[str, Any]]:
    """Return the recipe's settings as configuration tables; the algorithm is DP-FedAdamW.

    calibrated  True if the configuration has a target epsilon; the batch is then automatic
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
    damping = max(1 - facts.gamma, LEAST_DAMPING)
    if not facts.private:
        return rounded(damping * (PLAIN_HEAD if facts.part == "head" else PLAIN_BODY))
    walk = max(math.sqrt(facts.steps / facts.cohort) * facts.schedule, SHORTEST_WALK)
    return rounded(facts.spread * damping * math.sqrt(facts.floor) / walk)


def rounded(lr: float) -> float:
    return float(f"{lr:.3g}")

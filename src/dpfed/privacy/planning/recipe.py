"""The learning rate of DP-FedAdamW without tuning: a function of public numbers only.

With noise, second moments contain almost only noise. One local step therefore moves a weight by
η/√κ times a standard normal number, and the alignment repeats the move 1/(1-γ) times. Over T·K
steps of S averaged clients, noise alone moves every trained weight by about

    η/√κ · 1/(1-γ) · √(T·K/S)

The recipe chooses η so that this distance is a constant. The constant depends on the trained part:
weights with a large fan-in must move less, because a layer adds up their noise. The formula does
not contain C, σ or B, because steps are divided by the standard deviation of the noise.

In a run of few rounds the alignment repeats a move fewer times, and the average over rounds holds
back more of it. Such a run gets the rate at which noise moves its result as far as in a run of
`SHORT_ROUNDS` rounds; `reach` computes both distances exactly.
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
# Least value of √(T·K/S) times `schedule`. It limits the learning rate of runs with few steps,
# because in a few steps a weight must not move as far as in many.
SHORTEST_WALK = 3.0
# Runs of fewer rounds than this get a larger rate, because their moves are repeated fewer times.
SHORT_ROUNDS = 20
# Least value of 1-γ in the formula. Without this limit, γ = 1 would give a learning rate of 0.
LEAST_DAMPING = 0.01
# Weight of the direction of the last round, and decay of the average over rounds.
GAMMA = 0.9
AVERAGE = 0.95
# For language models: no momentum within a round, which weighs its first steps most, and second
# moments of blocks, because those of single weights are mostly sampling error.
LANGUAGE = {"beta1": 0.0, "bc_level": "block"}
# η/(1-γ) of a run without noise: the usual rates of Adam.
PLAIN_HEAD = 1e-2
PLAIN_BODY = 1e-3


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """The public numbers that determine the learning rate.

    rounds       rounds T
    local_steps  local steps K of a client in a round
    cohort       clients in each round, S
    gamma        weight γ of the global direction
    average      decay of the average over rounds; 0: the last round is the result
    floor        floor κ of corrected second moments, in units of Φ; 1 without bias correction
    schedule     root mean square of η_t/η_0 over the rounds
    part         what is trained: "head", "adapter", or "layers" for other modules
    fan_in       mean fan-in of the trained matrices; it counts for "layers" only
    private      True if noise is added
    """

    rounds: int
    local_steps: int
    cohort: int
    gamma: float
    average: float
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


def recipe(calibrated: bool = True, language: bool = False) -> dict[str, dict[str, Any]]:
    """Return the recipe's settings as configuration tables; the algorithm is DP-FedAdamW.

    calibrated  True if the configuration has a target epsilon; the batch is then automatic
    language    True for causal language models
    """
    tables: dict[str, dict[str, Any]] = {
        "algorithm": {"name": METHOD, "lr": "auto", "gamma": GAMMA},
        "privacy": {"clip_mode": "automatic", "clip": 1.0},
        "run": {"cohort_choice": "balanced", "lr_schedule": "constant", "average": AVERAGE},
    }
    if calibrated:
        tables["privacy"]["batch"] = "auto"
    if language:
        tables["algorithm"] |= LANGUAGE
    return tables


def automatic_lr(facts: RecipeFacts) -> float:
    """Return the base learning rate η0, rounded to three digits."""
    damping = max(1 - facts.gamma, LEAST_DAMPING)
    if not facts.private:
        return rounded(damping * (PLAIN_HEAD if facts.part == "head" else PLAIN_BODY))
    rounds = max(facts.rounds, SHORT_ROUNDS)
    steps = rounds * facts.local_steps
    walk = max(math.sqrt(steps / facts.cohort) * facts.schedule, SHORTEST_WALK)
    lr = facts.spread * damping * math.sqrt(facts.floor) / walk
    if facts.rounds < rounds:
        longer, shorter = (reach(t, facts.gamma, facts.average) for t in (rounds, facts.rounds))
        lr *= longer / shorter
    return rounded(lr)


def reach(rounds: int, gamma: float, average: float) -> float:
    """Return how far the result moves if each round adds an independent move of variance 1.

    A round of the change Δ_t = b_t + γ Δ_{t-1} has its own move b_t and repeats the last change.
    After j rounds b_t has moved the weights by (1 + γ + ... + γ^(j-1)) b_t. The result is the mean
    of the rounds' weights, in which round t counts a^(T-t).

    average  the decay a; 0 for the last round alone
    """
    shares = [average ** (rounds - t) for t in range(1, rounds + 1)]
    repeats = [sum(gamma**i for i in range(j)) for j in range(1, rounds + 1)]
    squares = 0.0
    for first in range(rounds):
        moved = sum(share * times for share, times in zip(shares[first:], repeats, strict=False))
        squares += (moved / sum(shares)) ** 2
    return math.sqrt(squares)


def rounded(lr: float) -> float:
    return float(f"{lr:.3g}")

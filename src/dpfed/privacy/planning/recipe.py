"""Choose the learning rate of DP-FedAdamW without tuning, from numbers that are not private.

η is the learning rate and Φ the variance of the noise in a gradient. κ is the least second moment,
in units of Φ. A run has T rounds of K local steps, and S clients take part in each round. Alignment
adds γ times the global change of the last round to the current change.

With noise, second moments contain almost only noise. One local step therefore moves a weight by
η/√κ times a standard normal number, and alignment repeats this move 1/(1-γ) times in total. Over
T·K steps of S averaged clients, noise alone moves every trained weight by about

    η/√κ · 1/(1-γ) · √(T·K/S)

The recipe chooses η so that this distance is a constant. The constant depends on the trained part:
weights with a large fan-in must move less, because a layer adds up their noise. Clip norm, noise
multiplier and batch size do not matter: steps are divided by the standard deviation of the noise.

In a run of few rounds, alignment repeats a move fewer times, and the average over rounds contains
less of it. Such a run gets a larger η: noise then moves its result as far as in a run of
`SHORT_ROUNDS` rounds. `reach` computes both distances.
docs/recipe.md has the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["head", "adapter", "layers"]

# Algorithm whose learning rate and other settings the recipe chooses.
METHOD = "dp-fedadamw"
# Distance by which noise alone should move a weight in the whole run, for each trained part. For
# other layers than heads and adapters, it is divided by the square root of the fan-in.
SPREAD_HEAD = 0.3
SPREAD_ADAPTER = 0.12
SPREAD_LAYER = 0.3
# Least value of √(rounds · local steps / cohort) times `schedule` in the formula of the learning
# rate. In a run of few steps, a weight must not move as far as in a run of many steps.
SHORTEST_WALK = 3.0
# Runs of fewer rounds than this get a larger learning rate. Each later round repeats a part of a
# round's change (alignment), and a short run has few later rounds.
SHORT_ROUNDS = 20
# Least value of 1 - `gamma` in the formula. Without it, gamma = 1 would give a learning rate of 0.
LEAST_DAMPING = 0.01
# Recommended weight of the last round's change (alignment), and decay of the average over rounds.
GAMMA = 0.9
AVERAGE = 0.95
# Language models use no momentum within a round, because it overweights the first steps. They use
# second moments of blocks of weights: those of single weights are mostly sampling error.
LANGUAGE = {"beta1": 0.0, "bc_level": "block"}
# Learning rates of a run without noise, before the factor 1-γ: the usual rates of Adam.
PLAIN_HEAD = 1e-2
PLAIN_BODY = 1e-3


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """The numbers that determine the recipe's learning rate; none of them is private.

    rounds       rounds T
    local_steps  local steps K of a client in a round
    cohort       clients in each round, S
    gamma        weight γ of the last round's global change in the current change
    average      decay of the average over rounds; 0: the last round is the result
    floor        least second moment κ after bias correction, in units of the noise variance Φ; 1
                 without bias correction
    schedule     root mean square over the rounds of (learning rate / base learning rate)
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
        """The distance by which noise alone should move a weight in the whole run."""
        if self.part == "head":
            return SPREAD_HEAD
        return SPREAD_ADAPTER if self.part == "adapter" else SPREAD_LAYER / math.sqrt(self.fan_in)


def recipe(calibrated: bool = True, language: bool = False) -> dict[str, dict[str, Any]]:
    """Return the recipe's settings as configuration tables; the algorithm is DP-FedAdamW.

    calibrated  True if the configuration has a target epsilon; the batch size is then automatic
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
    """Return the base learning rate, rounded to three digits.

    The learning rate of a round is this number, multiplied by the schedule of the run.
    """
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
    """Return the standard deviation of a run's result if each round adds an own move of variance 1.

    Round t changes the weights by Δ_t = b_t + γ Δ_{t-1}: its own move b_t and a part of the last
    change. Over j rounds b_t moves the weights by (1 + γ + ... + γ^(j-1)) b_t. The result is the
    mean of the weights after each round, in which round t of T counts a^(T-t).

    rounds   number of rounds T
    gamma    weight γ of the last change
    average  decay a of the mean; 0 for the last round alone
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

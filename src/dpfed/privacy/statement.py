"""The privacy statement: who can see what, with which guarantee, and what was assumed public (SPEC 6.1, 6.2).

The third-party figure and figures of single clients are never made public together: the first holds only as long as
nobody outside knows who took part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfed.privacy.accounting import delta_at, membership_advantage, replace_one_epsilon, tuning_epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.views import View, view_epsilon

PUBLIC = (
    "number of clients, their sizes and sampling rates, clip norm, noise multiplier, architecture, initial weights, "
    "learning rates and every other setting"
)
NOT_COVERED = (
    "choosing settings by looking at results on private data, floating-point effects, timing and other side channels"
)


@dataclass(frozen=True)
class Planned:
    """A plan as the statement speaks of it: one mechanism, T rounds of K steps, participation S/N."""

    step: Mechanism
    local_steps: int
    rounds: int
    participation: float
    delta: float
    unit: str = "record"

    @property
    def worst(self) -> list[tuple[Mechanism, int]]:
        """The history of a client that takes part in every round."""
        return [(self.step, self.local_steps * self.rounds)]

    def assumptions(self) -> str:
        accountant = "PLD" if self.step.sampling == "poisson" else "RDP"
        return (
            f"(epsilon, delta = {self.delta:g}) differential privacy for {self.step.adjacency} {self.unit} of one client; "
            f"{self.step.sampling} sampling at rate {self.step.rate:.4g}; noise multiplier {self.step.noise_multiplier:.4g}; "
            f"{accountant} accountant"
        )

    def over_rounds(self, view: View, points: int = 25) -> tuple[list[int], list[float]]:
        """Epsilon after some of the rounds, for a plot."""
        at = sorted({round(1 + i * (self.rounds - 1) / max(1, points - 1)) for i in range(points)})
        return at, [view_epsilon(view, self.step, self.local_steps, t, self.participation, self.delta) for t in at]

    def meaning(self) -> dict[str, float]:
        """What people ask of an epsilon: the replace-one figure and the largest advantage in guessing membership."""
        out = {"membership_advantage": membership_advantage(self.worst)}
        if self.step.sampling == "poisson":
            out["replace_one"] = replace_one_epsilon(self.worst, self.delta)
        return out

    def curve(self, epsilons: list[float]) -> list[tuple[float, float]]:
        """(epsilon, delta) pairs that hold at the same time."""
        return [(e, delta_at(self.worst, e)) for e in epsilons]

    def tuned(self, runs: int) -> float:
        """Epsilon when the best of so many runs on the same data was chosen."""
        return tuning_epsilon(self.worst, self.delta, runs)


def asymptotic(planned: Planned, clients: int | None) -> dict[str, float]:
    """The paper's formulas (13) and (14) with constant 1: not a guarantee, printed for comparison only (SPEC 6.6)."""
    q, sigma = planned.step.rate, planned.step.noise_multiplier
    steps = planned.rounds * planned.local_steps
    share = planned.participation
    logs = math.log(2 * planned.rounds / planned.delta) * math.log(2 / planned.delta)
    eq13 = q * math.sqrt(steps * logs) / sigma
    out = {"paper_eq_13": eq13}
    if clients is not None:
        out["paper_eq_14"] = eq13 * math.sqrt(clients / share)
    return out

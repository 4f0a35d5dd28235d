"""Who can see what, and the epsilon of each (SPEC 6.2).

The server sees every message of a client and knows who took part; its number is the headline. A third party sees only
the global models and must not know who took part; its smaller number is void as soon as a seed, a cohort or any
per-client figure is public, and when clients choose for themselves whether they take part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import (
    Term,
    canonical,
    check_against_rdp,
    check_delta,
    epsilon,
    epsilon_of_terms,
    mixed_rdp_curve,
    rdp_curve,
    rdp_curve_epsilon,
    rdp_epsilon,
)
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_setting

View = Literal["server_worst", "server_expected", "third_party"]


@dataclass(frozen=True)
class Rounds:
    """`rounds` rounds of `local_steps` steps each; in each the client takes part with `probability`, by a secret coin.

    Where the eligible clients or the cohort change, one `Rounds` stands for each stretch of equal S_t/eligible_t.
    """

    step: Mechanism
    local_steps: int
    rounds: int = 1
    probability: float = 1.0

    def __post_init__(self) -> None:
        if self.local_steps < 0 or self.rounds < 0:
            raise DpfedError(
                f"{self.rounds} rounds of {self.local_steps} local steps cannot be accounted for."
            )
        if not 0 <= self.probability <= 1:
            raise DpfedError(
                f"the probability of taking part lies in [0, 1], not {show_setting(self.probability)}."
            )


def participation_probability(cohort: int, clients: int, colluding: int = 0) -> float:
    """S/(N-c): colluding clients know when they were not drawn, so only N-c clients share the secret."""
    if not 1 <= cohort <= clients:
        raise DpfedError(f"a cohort of {cohort} cannot be drawn from {clients} clients.")
    if not 0 <= colluding < clients:
        raise DpfedError(f"{colluding} of {clients} clients cannot collude against another one.")
    return min(1.0, cohort / (clients - colluding))


def server_epsilon(step: Mechanism, local_steps: int, rounds: int, delta: float) -> float:
    """What the server learns of a client that took part in `rounds` rounds."""
    return epsilon([(step, local_steps * rounds)], delta).value


def expected_rounds(rounds: int, participation: float) -> int:
    """L*T rounded up, so that the figure is never for fewer rounds than expected."""
    return math.ceil(participation * rounds - 1e-9)


def third_party_epsilon(
    step: Mechanism, local_steps: int, rounds: int, participation_prob: float, delta: float
) -> float:
    """Smallest epsilon with sum_n Bin(n; T, S/N) delta_{nK}(epsilon) <= delta (SPEC 6.2 b)."""
    return third_party_rounds_epsilon(
        [Rounds(step, local_steps, rounds, participation_prob)], delta
    )


def third_party_rounds_epsilon(history: Sequence[Rounds], delta: float) -> float:
    """The same for probabilities, rates or noise that change from round to round (Poisson-binomial participation).

    Fixed-size sampling has no loss distribution here; the same mixture is then taken of its Renyi divergences, which
    is valid and looser.
    """
    check_delta(delta)
    taken = [
        part
        for part in history
        if part.probability > 0 and part.rounds > 0 and part.local_steps > 0
    ]
    # The server's figure is needed as the check, and it refuses histories that no one epsilon covers.
    bound = rdp_epsilon([(part.step, part.local_steps * part.rounds) for part in taken], delta)
    if taken and taken[0].step.sampling == "fixed_wor":
        curves = [
            mixed_rdp_curve(
                rdp_curve([(part.step, part.local_steps)]), part.probability, part.rounds
            )
            for part in taken
        ]
        return rdp_curve_epsilon(np.sum(curves, axis=0), delta)
    value = epsilon_of_terms(canonical(_term(part) for part in taken), delta)
    check_against_rdp(value, bound)
    return value


def _term(part: Rounds) -> Term:
    step = part.step
    steps = part.local_steps * step.batches
    return Term(step.rate, step.effective_multiplier, steps, part.probability, part.rounds)


def view_epsilon(
    view: View, step: Mechanism, local_steps: int, rounds: int, participation: float, delta: float
) -> float:
    """The epsilon of one view of a plan of `rounds` rounds with participation L = S/N."""
    if view == "third_party":
        return third_party_epsilon(step, local_steps, rounds, participation, delta)
    taken = rounds if view == "server_worst" else expected_rounds(rounds, participation)
    return server_epsilon(step, local_steps, taken, delta)

"""The epsilon of each observer: the server, and a third party that sees only the global models.

The server sees every message of a client and knows who took part; its figure is the headline. A
third party must not know who took part. Its smaller figure is void as soon as a seed, a cohort or
any per-client figure is public, and when clients choose for themselves whether they take part.
See docs/privacy.md, "Two observers".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.accounting.loss_distribution import Term, canonical
from dpfed.privacy.accounting.pld import check_against_rdp, epsilon, epsilon_of_terms
from dpfed.privacy.accounting.rdp import mixed_rdp_curve, rdp_curve, rdp_curve_epsilon, rdp_epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_setting

View = Literal["server_worst", "server_expected", "third_party"]
VIEWS = get_args(View)


@dataclass(frozen=True)
class Rounds:
    """`rounds` rounds of `local_steps` steps; the client takes part in each with `probability`.

    The draw is secret. A history of changing cohorts has one `Rounds` per stretch of equal S/N.
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
                "the probability of taking part lies in [0, 1], "
                f"not {show_setting(self.probability)}."
            )

    @property
    def term(self) -> Term:
        return Term.of(self.step, self.local_steps, self.probability, self.rounds)


def participation_probability(cohort: int, clients: int, colluding: int = 0) -> float:
    """S/(N-c): colluding clients know when they were not drawn, so only N-c share the secret."""
    if not 1 <= cohort <= clients:
        raise DpfedError(f"a cohort of {cohort} cannot be drawn from {clients} clients.")
    if not 0 <= colluding < clients:
        raise DpfedError(f"{colluding} of {clients} clients cannot collude against another one.")
    return min(1.0, cohort / (clients - colluding))


def server_epsilon(step: Mechanism, local_steps: int, rounds: int, delta: float) -> float:
    """The server's epsilon for a client that took part in `rounds` rounds."""
    return epsilon([(step, local_steps * rounds)], delta).value


def expected_rounds(rounds: int, participation: float) -> int:
    """Expected number of rounds of one client, rounded up."""
    return math.ceil(participation * rounds - 1e-9)


def third_party_epsilon(history: Sequence[Rounds], delta: float) -> float:
    """Smallest epsilon with sum_n P(n) delta_{nK}(epsilon) <= delta, n the rounds that were taken.

    n is Poisson-binomial over the history. Fixed-size sampling has no loss distribution here; the
    mixture of its Renyi divergences is valid too, and looser.
    """
    check_delta(delta)
    possible = [
        part
        for part in history
        if part.probability > 0 and part.rounds > 0 and part.local_steps > 0
    ]
    # The server's figure is the check. It refuses histories that no single epsilon covers.
    bound = rdp_epsilon([(part.step, part.local_steps * part.rounds) for part in possible], delta)
    if possible and possible[0].step.sampling == "fixed_wor":
        curves = [
            mixed_rdp_curve(
                rdp_curve([(part.step, part.local_steps)]), part.probability, part.rounds
            )
            for part in possible
        ]
        return rdp_curve_epsilon(np.sum(curves, axis=0), delta)
    value = epsilon_of_terms(canonical(part.term for part in possible), delta)
    check_against_rdp(value, bound)
    return value


def as_seen(view: View, plan: Rounds) -> Rounds:
    """Return the plan with the participation of a view; the server knows each round's cohort."""
    if view == "server_worst":
        return replace(plan, probability=1.0)
    if view == "server_expected":
        rounds = expected_rounds(plan.rounds, plan.probability)
        return replace(plan, rounds=rounds, probability=1.0)
    return plan


def view_epsilon(view: View, plan: Rounds, delta: float) -> float:
    """The epsilon of one view of a plan whose participation S/N is `plan.probability`."""
    if view == "third_party":
        return third_party_epsilon([plan], delta)
    seen = as_seen(view, plan)
    return server_epsilon(seen.step, seen.local_steps, seen.rounds, delta)

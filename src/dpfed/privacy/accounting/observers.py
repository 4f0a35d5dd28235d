"""The epsilon of each observer: the server, and a third party that sees only the global models.

The server sees every message and knows who took part. Its epsilon is the main result.

The third party's epsilon is smaller, but it holds only while the third party does not know who took
part. It is void if a seed, a cohort or any number about a single client becomes public. It is also
void if clients decide themselves when they take part. See docs/privacy.md, "Two observers".
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
    """Rounds in which a client takes part with the same probability.

    If the probability changes during a run, the run is described by a sequence of such objects.

    step         mechanism of one local step
    local_steps  local steps of the client in a round
    rounds       number of rounds
    probability  probability that the client takes part in a round; who takes part is secret
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
    """Return the probability that a client takes part in a round, given what a third party knows.

    The third party sees only the global models. The probability is S/(N-c) for a cohort of S
    clients, N clients in all and c colluding clients. The colluding clients tell the third party in
    which rounds none of them was drawn. In such a round, the S clients were drawn from only N-c
    clients.
    """
    if not 1 <= cohort <= clients:
        raise DpfedError(f"a cohort of {cohort} cannot be drawn from {clients} clients.")
    if not 0 <= colluding < clients:
        raise DpfedError(f"{colluding} of {clients} clients cannot collude against another one.")
    return min(1.0, cohort / (clients - colluding))


def server_epsilon(step: Mechanism, local_steps: int, rounds: int, delta: float) -> float:
    """Return the epsilon against the server for a client that took part in `rounds` rounds."""
    return epsilon([(step, local_steps * rounds)], delta)


def expected_rounds(rounds: int, participation: float) -> int:
    """Return in how many of `rounds` rounds a client is expected to take part, rounded up."""
    return math.ceil(participation * rounds - 1e-9)


def third_party_epsilon(history: Sequence[Rounds], delta: float) -> float:
    """Return the epsilon against a third party, who sees only the global models.

    `history` has the rounds of a client, in which it takes part with given probabilities.

    It is the smallest epsilon with sum_n P(n) delta_{nK}(epsilon) <= delta. Here n is the number of
    rounds in which the client took part, with a Poisson binomial distribution P. K is the number of
    local steps in a round, and delta_{nK}(epsilon) is the delta of nK steps. Fixed-size sampling
    uses Renyi DP instead, which gives a valid but larger epsilon.
    """
    check_delta(delta)
    possible = [
        part
        for part in history
        if part.probability > 0 and part.rounds > 0 and part.local_steps > 0
    ]
    # Compute the Renyi epsilon against the server as an upper bound, to check the result below.
    # `rdp_epsilon` also refuses histories that mix both kinds of sampling.
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
    """Return the plan with the participation that an observer (`view`) has to be assumed to know.

    server_worst     the client takes part in every round
    server_expected  the client takes part in the expected number of rounds
    third_party      the plan itself: this observer, who sees only the global models, does not know
                     who takes part
    """
    if view == "server_worst":
        return replace(plan, probability=1.0)
    if view == "server_expected":
        rounds = expected_rounds(plan.rounds, plan.probability)
        return replace(plan, rounds=rounds, probability=1.0)
    return plan


def capped(view: View, plan: Rounds, cap: int | None) -> Rounds:
    """Return the plan for this view (an observer) if a client takes part in at most `cap` rounds.

    With such a cap, it is nearly public in how many rounds each client takes part. The epsilon
    against an observer of the global models (third party) then equals the epsilon against the
    server. Without a cap, return the plan unchanged.
    """
    if cap is None or view == "server_expected":
        return plan
    return replace(plan, rounds=cap, probability=1.0)


def view_epsilon(view: View, plan: Rounds, delta: float) -> float:
    """Return the epsilon against one observer.

    `plan.probability` is the probability that a client takes part in a round.
    """
    if view == "third_party":
        return third_party_epsilon([plan], delta)
    seen = as_seen(view, plan)
    return server_epsilon(seen.step, seen.local_steps, seen.rounds, delta)

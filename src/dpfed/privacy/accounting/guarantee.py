"""The privacy guarantee of a plan: the epsilon of each observer, and what the epsilons assume.

The guarantee is fixed before anything is released, so it does not depend on who takes part. It
covers every mechanism that a client may run. A client whose privacy budget is spent leaves. For
each round, the guarantee assumes the smallest number of clients that can be left to draw from.

The observers are the server and a third party, who sees only the global models. The third party's
epsilon holds only while nobody outside knows who took part, so never publish it together with
epsilons of single clients. See docs/privacy.md, "Two observers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dpfed.errors import DpfedError, counted
from dpfed.privacy.accounting.eligibility import Chances
from dpfed.privacy.accounting.observers import (
    Rounds,
    expected_rounds,
    server_epsilon,
    third_party_epsilon,
)
from dpfed.privacy.accounting.pld import (
    delta_at,
    epsilon,
    membership_advantage,
    replace_one_epsilon,
    tuning_epsilon,
)
from dpfed.privacy.accounting.population import Population, largest_epsilon
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_delta, show_rate, show_sigma

PUBLIC = (
    "number of clients, their sizes and sampling rates, clip norm, noise multiplier, architecture, "
    "initial weights, learning rates and every other setting"
)
NOT_COVERED = (
    "choosing settings by looking at results on private data, floating-point effects, "
    "timing and other side channels"
)
CAPPED = "the number of a client's rounds is capped and public, so it equals the server's figure"
UNCOUNTED = (
    "epsilon holds only if what training started from was not trained on these clients' records"
)
# Largest number of distinct mechanisms of a plan for which each epsilon is computed. With more, one
# mechanism replaces all, to save time. Its privacy loss is at least as large as that of each.
MAX_EXACT_KINDS = 8


def delta_warning(
    delta: float, largest: int, unit: str = "record", section: str = "privacy"
) -> str | None:
    """Return a warning if delta is at least 1 / (10 R), where R is `largest`; else None.

    largest  number of protected units (records, or persons) of the largest client
    unit     name of the protected unit
    section  configuration section that contains delta
    """
    if delta < 1 / (10 * largest):
        return None
    advice = 10.0 ** math.floor(math.log10(0.999 / (10 * largest)))
    held = f"{largest} {unit}s" if largest != 1 else f"1 {unit}"
    if is_large_delta(delta, largest):
        return (
            f"{section}.delta = {show_delta(delta)} is at least 1 / {largest}, and the largest "
            f"client has {held}: publishing one {unit} at random satisfies such a guarantee, so "
            f"use {show_delta(advice)} or less"
        )
    return (
        f"{section}.delta = {show_delta(delta)} is at least a tenth of 1 / {largest}, and the "
        f"largest client has {held}: use {show_delta(advice)} or less"
    )


def is_large_delta(delta: float, largest: int) -> bool:
    """Return True if delta is at least 1 / `largest`.

    Such a guarantee is too weak: a mechanism that publishes one of the client's `largest` units,
    chosen at random, satisfies it.
    """
    return delta >= 1 / largest


def refuse_large_delta(
    delta: float, largest: int, unit: str, allowed: bool, section: str = "privacy"
) -> None:
    """Raise DpfedError if delta is at least 1 / `largest` and the user has not allowed this.

    largest  number of protected units (records, or persons) of the largest client
    unit     name of the protected unit
    allowed  value of `allow_large_delta` in this section of the configuration
    section  configuration section that contains delta
    """
    if is_large_delta(delta, largest) and not allowed:
        why = delta_warning(delta, largest, unit, section)
        raise DpfedError(f"{why} ({section}.allow_large_delta = true runs it anyway)")


Prior = tuple[tuple[Mechanism, int], ...]
"""Pairs (mechanism, number of local steps) of everything that was released before this run."""


@dataclass(frozen=True)
class PriorSpending:
    """Privacy spent earlier on the weights or the adapter from which a run starts.

    prior      the mechanisms that produced these weights; they count for every client
    uncounted  True if records of these clients may have been used at a privacy cost that nobody
               recorded
    notes      sentences for the user
    """

    prior: Prior = ()
    uncounted: bool = False
    notes: tuple[str, ...] = ()


NO_PRIOR_SPENDING = PriorSpending()


@dataclass(frozen=True)
class Planned:
    """All numbers of a plan that decide its epsilons: mechanisms, rounds and participation.

    kinds          the distinct mechanisms of the clients
    local_steps    local steps of a client in each round
    participation  fraction of the clients that take part in each round
    chances        pairs (probability that a client is drawn in a round, number of such rounds), for
                   the epsilon against an observer who sees only the global models
    delta          delta of the guarantee
    unit           name of the protected unit
    prior          mechanisms of earlier training that produced the starting weights
    uncounted      True if the starting weights may depend on these records at an unknown epsilon
    largest        number of protected units of the largest client; None if unknown
    cap            largest number of rounds in which one client takes part; None for no limit
    """

    kinds: tuple[Mechanism, ...]
    local_steps: int
    participation: float
    chances: Chances
    delta: float
    unit: str = "record"
    prior: Prior = ()
    uncounted: bool = False
    largest: int | None = None
    cap: int | None = None

    @property
    def warnings(self) -> list[str]:
        """Warnings that the guarantee of this plan is weak; empty if it is not."""
        found = None if self.largest is None else delta_warning(self.delta, self.largest, self.unit)
        return [found] if found else []

    @cached_property
    def rounds(self) -> int:
        return sum(count for _, count in self.chances)

    @property
    def most_rounds(self) -> int:
        """Largest number of rounds in which one client can take part."""
        return self.rounds_of_client(self.rounds)

    def rounds_of_client(self, rounds: int) -> int:
        """Return in how many of the first `rounds` rounds one client can take part at most."""
        return rounds if self.cap is None else min(rounds, self.cap)

    @property
    def worst_client(self) -> str:
        """Text that describes the client with the largest epsilon, `server_worst`."""
        if self.cap is None:
            return "a client in every round"
        return f"a client in {self.cap} of {self.rounds} rounds, its cap"

    @property
    def third_party_void(self) -> str | None:
        """Reason why hiding who takes part does not lower epsilon; None if it does.

        The third party is an observer who sees only the global models. With a reason, its epsilon
        equals the epsilon against the server.
        """
        return None if self.cap is None else CAPPED

    @cached_property
    def worst_kind(self) -> Mechanism:
        """The mechanism with the largest epsilon of all clients' mechanisms.

        For a plan of more than MAX_EXACT_KINDS mechanisms, this is a mechanism built from the
        highest rate and the least noise. Its epsilon is at least as large as the epsilon of each
        mechanism in the plan.
        """
        return max(
            self._accounted_kinds,
            key=lambda kind: server_epsilon(kind, self.local_steps, self.most_rounds, self.delta),
        )

    @property
    def bound(self) -> list[tuple[Mechanism, int]]:
        """A history (mechanisms and steps) with at least each client's epsilon, at every delta.

        `worst_kind` is not enough. It has the largest epsilon at the plan's delta, but a different
        mechanism may have the largest epsilon at another delta.
        """
        return [*self.prior, (self._dominating, self.local_steps * self.most_rounds)]

    @property
    def histories(self) -> list[list[tuple[Mechanism, int]]]:
        """Histories (mechanisms and steps) of clients with the most rounds, one per mechanism."""
        return self._histories_after(self.most_rounds)

    def _histories_after(self, rounds: int) -> list[list[tuple[Mechanism, int]]]:
        steps = self.local_steps * rounds
        return [[*self.prior, (kind, steps)] for kind in self._accounted_kinds]

    @cached_property
    def _accounted_kinds(self) -> tuple[Mechanism, ...]:
        return self.kinds if len(self.kinds) <= MAX_EXACT_KINDS else (self._dominating,)

    @cached_property
    def _dominating(self) -> Mechanism:
        """A mechanism built from the highest rate and the least noise multiplier of all `kinds`.

        Its epsilon is at least as large as the epsilon of each mechanism in `kinds`.
        """
        return replace(
            self.kinds[0],
            rate=max(kind.rate for kind in self.kinds),
            noise_multiplier=min(kind.noise_multiplier for kind in self.kinds),
        )

    @cached_property
    def server_worst(self) -> float:
        """Largest epsilon of a client against the server, at the end of the run."""
        return self.server(self.most_rounds)

    @cached_property
    def server_expected(self) -> float:
        """Epsilon against the server for a client with the expected number of rounds."""
        return self.server(expected_rounds(self.rounds, self.participation))

    def server(self, rounds: int) -> float:
        """Return the largest epsilon against the server of clients with this number of rounds."""
        if self.prior:
            return max(epsilon(h, self.delta) for h in self._histories_after(rounds))
        if self.kinds[0].sampling == "poisson":
            population = Population.of(self.kinds, rounds, self.local_steps)
            return largest_epsilon(population, self.delta)
        return max(
            server_epsilon(kind, self.local_steps, rounds, self.delta) for kind in self.kinds
        )

    def server_after(self, rounds: int) -> float:
        """Return the largest epsilon of a client against the server after `rounds` rounds of a run.

        The client took part in all these rounds, or in as many as the limit on its rounds (cap)
        allows.
        """
        return self.server(self.rounds_of_client(rounds))

    @cached_property
    def third_party(self) -> float:
        """Epsilon against a third party, who sees only the global models, after all rounds.

        It is at most the epsilon against the server.
        """
        return self.third_party_after(self.rounds)

    def third_party_after(self, rounds: int) -> float:
        if self.cap is not None:
            return self.server_after(rounds)
        stretches: list[tuple[float, int]] = []
        left = rounds
        for probability, count in self.chances:
            stretches.append((probability, min(count, left)))
            left -= stretches[-1][1]
        before = [Rounds(kind, steps) for kind, steps in self.prior]
        figures = [
            third_party_epsilon(
                [*before, *(Rounds(kind, self.local_steps, n, p) for p, n in stretches)], self.delta
            )
            for kind in self._accounted_kinds
        ]
        return min(max(figures), self.server(rounds))

    @cached_property
    def rdp_server_worst(self) -> float:
        return max(rdp_epsilon(history, self.delta) for history in self.histories)

    def assumptions(self) -> str:
        past = (self.prior, self.uncounted)
        return assumptions(self.kinds, self.delta, self.unit, *past, cap=self.cap)

    def meaning(self) -> dict[str, float]:
        """Return, by name, numbers that explain the meaning of epsilon.

        membership_advantage  largest advantage of a membership test of one record
        replace_one           epsilon if one record is replaced, for Poisson sampling only
        """
        figures = {"membership_advantage": max(map(membership_advantage, self.histories))}
        if self.kinds[0].sampling == "poisson":
            figures["replace_one"] = max(
                replace_one_epsilon(history, self.delta) for history in self.histories
            )
        return figures

    def curve(self, epsilons: Sequence[float]) -> list[tuple[float, float]]:
        """Return pairs (epsilon, delta), one for each given epsilon, that hold for every client."""
        return [(e, max(delta_at(history, e) for history in self.histories)) for e in epsilons]

    def tuned(self, runs: int) -> float:
        """Return the epsilon of publishing the best of `runs` runs on the same data."""
        return max(tuning_epsilon(history, self.delta, runs) for history in self.histories)


def assumptions(
    kinds: Sequence[Mechanism],
    delta: float,
    unit: str,
    prior: Prior = (),
    uncounted: bool = False,
    cap: int | None = None,
) -> str:
    """Return the text that states what an epsilon means.

    It names delta, the neighbouring relation, the protected unit, sampling, noise, accountant and
    the limit on a client's rounds.
    """
    first = kinds[0]
    accountant = "PLD" if first.sampling == "poisson" else "RDP"
    rates = _span([kind.rate for kind in kinds], show_rate)
    noise = _span([kind.noise_multiplier for kind in kinds], show_sigma)
    parts = [
        f"(epsilon, delta = {show_delta(delta)}) differential privacy for {first.adjacency} {unit} "
        "of one client",
        f"{first.sampling} sampling at rate {rates}",
        f"noise multiplier {noise}",
        f"{accountant} accountant",
    ]
    if cap is not None:
        parts.append(f"each client in at most {counted(cap, 'round')}")
    if prior:
        count = sum(steps for _, steps in prior)
        parts.append(
            f"with {count} releases besides: spent before on what it started from, "
            "or on counts of held-out records"
        )
    if uncounted:
        parts.append(UNCOUNTED)
    return "; ".join(parts)


def _span(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return the range of the values as text, "least to greatest"; one value if all look equal."""
    least = show(min(values))
    most = show(max(values))
    return least if least == most else f"{least} to {most}"


def asymptotic(planned: Planned, clients: int | None) -> dict[str, float]:
    """Return the asymptotic epsilons of the DP-FedAdamW paper, formulas (13) and (14).

    The formulas have an unknown constant, which is set to 1. The results are for comparison only
    and guarantee nothing. Formula (14) needs the number of clients.
    """
    kind = planned.worst_kind
    steps = planned.most_rounds * planned.local_steps
    logs = math.log(2 * planned.rounds / planned.delta) * math.log(2 / planned.delta)
    eq13 = kind.rate * math.sqrt(steps * logs) / kind.noise_multiplier
    figures = {"paper_eq_13": eq13}
    if clients is not None:
        figures["paper_eq_14"] = eq13 * math.sqrt(clients / planned.participation)
    return figures

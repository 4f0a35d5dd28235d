"""The privacy statement of a plan: each observer's guarantee, and the facts assumed public.

A statement is fixed before anything is released. It contains every mechanism that a client may run
and, per round, the fewest clients that a cohort can be drawn from. It does not depend on who took
part. Never publish the third-party figure together with figures of single clients: it holds only
while nobody outside knows who took part. See docs/privacy.md, "Two observers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.observers import (
    Rounds,
    expected_rounds,
    participation_probability,
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
UNCOUNTED = (
    "epsilon holds only if what training started from was not trained on these clients' records"
)
# More mechanisms than this are replaced by one that costs at least as much as each of them.
MAX_EXACT_KINDS = 8

Chances = tuple[tuple[float, int], ...]
"""(probability that a client is drawn in a round, number of such rounds), fixed in advance."""


def fewest_eligible(
    clients: int, cohort: int, rounds: int, limits: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return (fewest clients that a round can be drawn from, for how many rounds).

    `limits` is the number of rounds that each client's budget allows. Before round t there were
    S(t-1) participations. They exhaust the most clients if they fall on the smallest limits; a
    limit of L takes L rounds. The real course depends on who took part, so it may not be used.
    """
    if limits is None:
        return [(clients, rounds)]
    ordered = sorted(limits)
    stretches: list[tuple[int, int]] = []
    for t in range(1, rounds + 1):
        left = cohort * (t - 1)
        exhausted = 0
        while exhausted < clients and ordered[exhausted] <= min(left, t - 1):
            left -= ordered[exhausted]
            exhausted += 1
        eligible = clients - exhausted
        if stretches and stretches[-1][0] == eligible:
            stretches[-1] = (eligible, stretches[-1][1] + 1)
        else:
            stretches.append((eligible, 1))
    return stretches


def chances(cohort: int, eligible: Sequence[tuple[int, int]], colluding: int = 0) -> Chances:
    """The probability of being drawn; `colluding` fellow clients know when they were not drawn."""
    return tuple(
        (1.0 if n <= cohort else participation_probability(cohort, n, min(colluding, n - 1)), count)
        for n, count in eligible
    )


def delta_warning(
    delta: float, largest: int, unit: str = "record", section: str = "privacy"
) -> str | None:
    """Return a warning if delta is at least 1 / (10 R); `largest` is R, the most units held."""
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
    """Return True if a client of `largest` units may lose one of them within delta."""
    return delta >= 1 / largest


def refuse_large_delta(
    delta: float, largest: int, unit: str, allowed: bool, section: str = "privacy"
) -> None:
    """Refuse a delta of at least 1 / R, unless `section` allows it."""
    if is_large_delta(delta, largest) and not allowed:
        why = delta_warning(delta, largest, unit, section)
        raise DpfedError(f"{why} ({section}.allow_large_delta = true runs it anyway)")


Prior = tuple[tuple[Mechanism, int], ...]
"""(mechanism, number of local steps) of everything that was released before."""


@dataclass(frozen=True)
class PriorSpending:
    """Privacy spent on the weights or the adapter that a run starts from.

    prior      releases, counted for every client
    uncounted  True if the start may have used these clients' records without a record of the cost
    notes      sentences for the user
    """

    prior: Prior = ()
    uncounted: bool = False
    notes: tuple[str, ...] = ()


NO_PRIOR_SPENDING = PriorSpending()


@dataclass(frozen=True)
class Planned:
    """A plan of T rounds of K local steps, for clients that run one of the mechanisms `kinds`.

    prior, uncounted  as in `PriorSpending`
    largest           units of the largest client; None where unknown
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

    @property
    def warnings(self) -> list[str]:
        """Reasons why the figures of this plan are worth little."""
        found = None if self.largest is None else delta_warning(self.delta, self.largest, self.unit)
        return [found] if found else []

    @cached_property
    def rounds(self) -> int:
        return sum(count for _, count in self.chances)

    @cached_property
    def worst_kind(self) -> Mechanism:
        """The mechanism with the largest epsilon, or one that costs at least as much."""
        return max(
            self._accounted_kinds,
            key=lambda kind: server_epsilon(kind, self.local_steps, self.rounds, self.delta),
        )

    @property
    def bound(self) -> list[tuple[Mechanism, int]]:
        """A history that costs at least as much as any client's, at every delta.

        The costliest kind will not do: kinds of equal epsilon at this delta differ at another.
        """
        return [*self.prior, (self._dominating, self.local_steps * self.rounds)]

    @property
    def histories(self) -> list[list[tuple[Mechanism, int]]]:
        """One history per kind, of clients that take part in every round."""
        return self._histories_after(self.rounds)

    def _histories_after(self, rounds: int) -> list[list[tuple[Mechanism, int]]]:
        steps = self.local_steps * rounds
        return [[*self.prior, (kind, steps)] for kind in self._accounted_kinds]

    @cached_property
    def _accounted_kinds(self) -> tuple[Mechanism, ...]:
        return self.kinds if len(self.kinds) <= MAX_EXACT_KINDS else (self._dominating,)

    @cached_property
    def _dominating(self) -> Mechanism:
        """The highest rate with the least noise."""
        return replace(
            self.kinds[0],
            rate=max(kind.rate for kind in self.kinds),
            noise_multiplier=min(kind.noise_multiplier for kind in self.kinds),
        )

    @cached_property
    def server_worst(self) -> float:
        return self.server(self.rounds)

    @cached_property
    def server_expected(self) -> float:
        return self.server(expected_rounds(self.rounds, self.participation))

    def server(self, rounds: int) -> float:
        """The server's epsilon for the costliest client after it took part in `rounds` rounds."""
        if self.prior:
            return max(epsilon(h, self.delta).value for h in self._histories_after(rounds))
        if self.kinds[0].sampling == "poisson":
            population = Population.of(self.kinds, rounds, self.local_steps)
            return largest_epsilon(population, self.delta)
        return max(
            server_epsilon(kind, self.local_steps, rounds, self.delta) for kind in self.kinds
        )

    @cached_property
    def third_party(self) -> float:
        """The third party's epsilon, at most the server's figure."""
        return self.third_party_after(self.rounds)

    def third_party_after(self, rounds: int) -> float:
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
        return assumptions(self.kinds, self.delta, self.unit, self.prior, self.uncounted)

    def over_rounds(self, points: int = 25) -> tuple[list[int], list[float], list[float]]:
        """(rounds, server's figure, third party's figure) after some of the rounds, for a plot."""
        at = sorted({round(1 + i * (self.rounds - 1) / max(1, points - 1)) for i in range(points)})
        return at, [self.server(t) for t in at], [self.third_party_after(t) for t in at]

    def meaning(self) -> dict[str, float]:
        """Figures that explain an epsilon: membership advantage, and epsilon under replace-one."""
        figures = {"membership_advantage": max(map(membership_advantage, self.histories))}
        if self.kinds[0].sampling == "poisson":
            figures["replace_one"] = max(
                replace_one_epsilon(history, self.delta) for history in self.histories
            )
        return figures

    def curve(self, epsilons: Sequence[float]) -> list[tuple[float, float]]:
        """(epsilon, delta) pairs that hold at the same time, for every client."""
        return [(e, max(delta_at(history, e) for history in self.histories)) for e in epsilons]

    def tuned(self, runs: int) -> float:
        """Epsilon of the best of `runs` runs on the same data, all of them counted."""
        return max(tuning_epsilon(history, self.delta, runs) for history in self.histories)


def assumptions(
    kinds: Sequence[Mechanism], delta: float, unit: str, prior: Prior = (), uncounted: bool = False
) -> str:
    """Return the facts beside an epsilon: delta, neighbours, unit, sampling, noise, accountant."""
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
    """Return one value as text, or the least and the greatest of several."""
    least = show(min(values))
    most = show(max(values))
    return least if least == most else f"{least} to {most}"


def asymptotic(planned: Planned, clients: int | None) -> dict[str, float]:
    """The paper's formulas (13) and (14) with constant 1: for comparison only, not a guarantee."""
    kind = planned.worst_kind
    steps = planned.rounds * planned.local_steps
    logs = math.log(2 * planned.rounds / planned.delta) * math.log(2 / planned.delta)
    eq13 = kind.rate * math.sqrt(steps * logs) / kind.noise_multiplier
    figures = {"paper_eq_13": eq13}
    if clients is not None:
        figures["paper_eq_14"] = eq13 * math.sqrt(clients / planned.participation)
    return figures

"""The privacy statement of a plan: who can see what, with which guarantee, what was assumed public (SPEC 6.1, 6.2).

A statement is fixed before anything is released: it knows every mechanism that any client may run and, round by round,
the fewest clients a cohort can be drawn from. Nothing in it depends on who took part. The third-party figure and
figures of single clients are never made public together: the first holds only while nobody outside knows who took part.
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
    third_party_rounds_epsilon,
)
from dpfed.privacy.accounting.pld import (
    delta_at,
    epsilon,
    membership_advantage,
    rdp_epsilon,
    replace_one_epsilon,
    tuning_epsilon,
)
from dpfed.privacy.accounting.population import largest_epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_delta, show_rate, show_sigma

PUBLIC = (
    "number of clients, their sizes and sampling rates, clip norm, noise multiplier, architecture, initial weights, "
    "learning rates and every other setting"
)
NOT_COVERED = "choosing settings by looking at results on private data, floating-point effects, timing and other side channels"
UNCOUNTED = (
    "epsilon holds only if what training started from was not trained on these clients' records"
)
FEW = 8  # so many different mechanisms are accounted for one by one; for more, one that costs at least as much as each

Chances = tuple[tuple[float, int], ...]
"""(probability that a client is drawn in a round, for how many rounds), an upper bound known in advance."""


def fewest_eligible(
    clients: int, cohort: int, rounds: int, limits: Sequence[int] | None
) -> list[tuple[int, int]]:
    """(fewest clients that a round can be drawn from, for how many rounds).

    `limits` says how many rounds each client's budget allows. Before round t there were S(t-1) participations, and they
    can exhaust the most clients by falling on those with the smallest limits; a limit of L takes L rounds to reach.
    What really happened would be a smaller exhaustion, but it depends on who took part, so it may not be used.
    """
    if limits is None:
        return [(clients, rounds)]
    ordered = sorted(limits)
    out: list[tuple[int, int]] = []
    for t in range(1, rounds + 1):
        left, gone = cohort * (t - 1), 0
        while gone < clients and ordered[gone] <= min(left, t - 1):
            left -= ordered[gone]
            gone += 1
        if out and out[-1][0] == clients - gone:
            out[-1] = (clients - gone, out[-1][1] + 1)
        else:
            out.append((clients - gone, 1))
    return out


def chances(cohort: int, eligible: Sequence[tuple[int, int]], colluding: int = 0) -> Chances:
    """The probability of being drawn against `colluding` fellow clients, who know when they were not drawn."""
    return tuple(
        (1.0 if n <= cohort else participation_probability(cohort, n, min(colluding, n - 1)), count)
        for n, count in eligible
    )


def delta_warning(
    delta: float, largest: int, unit: str = "record", section: str = "privacy"
) -> str | None:
    """Return a warning if delta is at least 1 / (10 R); `largest` is R, the largest client's units."""
    if delta < 1 / (10 * largest):
        return None
    advice = 10.0 ** math.floor(math.log10(0.999 / (10 * largest)))
    held = f"{largest} {unit}s" if largest != 1 else f"1 {unit}"
    if is_large_delta(delta, largest):
        return (
            f"{section}.delta = {show_delta(delta)} is at least 1 / {largest}, and the largest client has {held}: "
            f"publishing one {unit} at random satisfies such a guarantee, so use {show_delta(advice)} or less"
        )
    return (
        f"{section}.delta = {show_delta(delta)} is at least a tenth of 1 / {largest}, and the largest client has {held}: "
        f"use {show_delta(advice)} or less"
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
    """What was spent before on what a run starts from.

    prior      counted for every client
    uncounted  whether there is something whose cost nobody has counted
    notes      what to say about it
    """

    prior: Prior = ()
    uncounted: bool = False
    notes: tuple[str, ...] = ()


NO_PRIOR_SPENDING = PriorSpending()


@dataclass(frozen=True)
class Planned:
    """A plan as the statement speaks of it: T rounds of K local steps, for clients that run one of `kinds`.

    prior      what every client may have spent before, on what the run starts from
    uncounted  whether the run starts from something whose cost to these clients nobody has counted
    largest    units of the largest client; None where unknown
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
        """What makes the figures of this plan worth little."""
        found = None if self.largest is None else delta_warning(self.delta, self.largest, self.unit)
        return [found] if found else []

    @cached_property
    def rounds(self) -> int:
        return sum(count for _, count in self.chances)

    @cached_property
    def worst_kind(self) -> Mechanism:
        """The mechanism with the largest epsilon (one that costs at least as much, where there are many)."""
        if len(self._few) == 1:
            return self._few[0]
        return max(
            self.kinds,
            key=lambda kind: server_epsilon(kind, self.local_steps, self.rounds, self.delta),
        )

    @property
    def bound(self) -> list[tuple[Mechanism, int]]:
        """A history that costs at least as much as that of any client, at every delta and whatever is added to it.

        The costliest kind will not do: kinds with one epsilon at this delta have different ones at another.
        """
        return [*self.prior, (self._dominating(), self.local_steps * self.rounds)]

    @property
    def histories(self) -> list[list[tuple[Mechanism, int]]]:
        """Of clients that take part in every round, one for each kind. Which of them costs most depends on the question."""
        return [[*self.prior, (kind, self.local_steps * self.rounds)] for kind in self._few]

    @cached_property
    def _few(self) -> tuple[Mechanism, ...]:
        """The mechanisms that are accounted for one by one."""
        return self.kinds if len(self.kinds) <= FEW else (self._dominating(),)

    @cached_property
    def server_worst(self) -> float:
        return self.server(self.rounds)

    @cached_property
    def server_expected(self) -> float:
        return self.server(expected_rounds(self.rounds, self.participation))

    def server(self, rounds: int) -> float:
        """The server's figure for the costliest client after it took part in so many rounds."""
        first, steps = self.kinds[0], self.local_steps * rounds
        if self.prior:
            return max(
                epsilon([*self.prior, (kind, steps)], self.delta).value for kind in self._few
            )
        if first.sampling == "poisson":
            return largest_epsilon(
                [kind.rate for kind in self.kinds],
                [rounds] * len(self.kinds),
                self.local_steps,
                [kind.noise_multiplier for kind in self.kinds],
                self.delta,
                batches=first.batches,
                releases=first.releases,
            )
        return max(
            server_epsilon(kind, self.local_steps, rounds, self.delta) for kind in self.kinds
        )

    @cached_property
    def third_party(self) -> float:
        """SPEC 6.2(b), never above the server's figure."""
        return self.third_party_after(self.rounds)

    def third_party_after(self, rounds: int) -> float:
        parts, left = [], rounds
        for probability, count in self.chances:
            parts.append((probability, min(count, left)))
            left -= parts[-1][1]
        before = [Rounds(kind, steps) for kind, steps in self.prior]
        found = max(
            third_party_rounds_epsilon(
                [*before, *(Rounds(kind, self.local_steps, n, p) for p, n in parts)], self.delta
            )
            for kind in self._few
        )
        return min(found, self.server(rounds))

    @cached_property
    def rdp_server_worst(self) -> float:
        steps = self.local_steps * self.rounds
        return max(rdp_epsilon([*self.prior, (kind, steps)], self.delta) for kind in self._few)

    def _dominating(self) -> Mechanism:
        return replace(
            self.kinds[0],
            rate=max(kind.rate for kind in self.kinds),
            noise_multiplier=min(kind.noise_multiplier for kind in self.kinds),
        )

    def assumptions(self) -> str:
        return assumptions(self.kinds, self.delta, self.unit, self.prior, self.uncounted)

    def over_rounds(self, points: int = 25) -> tuple[list[int], list[float], list[float]]:
        """(rounds, server's figure, third party's figure) after some of the rounds, for a plot."""
        at = sorted({round(1 + i * (self.rounds - 1) / max(1, points - 1)) for i in range(points)})
        return at, [self.server(t) for t in at], [self.third_party_after(t) for t in at]

    def meaning(self) -> dict[str, float]:
        """What people ask of an epsilon: the replace-one figure and the largest advantage in guessing membership."""
        out = {"membership_advantage": max(map(membership_advantage, self.histories))}
        if self.kinds[0].sampling == "poisson":
            out["replace_one"] = max(
                replace_one_epsilon(history, self.delta) for history in self.histories
            )
        return out

    def curve(self, epsilons: Sequence[float]) -> list[tuple[float, float]]:
        """(epsilon, delta) pairs that hold at the same time, for every client."""
        return [(e, max(delta_at(history, e) for history in self.histories)) for e in epsilons]

    def tuned(self, runs: int) -> float:
        """Epsilon when the best of so many runs on the same data was chosen and all of them are counted."""
        return max(tuning_epsilon(history, self.delta, runs) for history in self.histories)


def assumptions(
    kinds: Sequence[Mechanism], delta: float, unit: str, prior: Prior = (), uncounted: bool = False
) -> str:
    """What stands beside every epsilon: delta, neighbouring relation, unit, sampling, noise, accountant."""
    first = kinds[0]
    accountant = "PLD" if first.sampling == "poisson" else "RDP"
    rates = _span([kind.rate for kind in kinds], show_rate)
    noise = _span([kind.noise_multiplier for kind in kinds], show_sigma)
    return (
        f"(epsilon, delta = {show_delta(delta)}) differential privacy for {first.adjacency} {unit} of one client; "
        f"{first.sampling} sampling at rate {rates}; noise multiplier {noise}; {accountant} accountant"
        + (
            f"; with {sum(n for _, n in prior)} releases besides: spent before on what it started from, or on counts of held-out records"
            if prior
            else ""
        )
        + (f"; {UNCOUNTED}" if uncounted else "")
    )


def _span(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return one value as text, or the least and the greatest of several."""
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"


def asymptotic(planned: Planned, clients: int | None) -> dict[str, float]:
    """The paper's formulas (13) and (14) with constant 1: not a guarantee, printed for comparison only (SPEC 6.6)."""
    kind = planned.worst_kind
    steps = planned.rounds * planned.local_steps
    logs = math.log(2 * planned.rounds / planned.delta) * math.log(2 / planned.delta)
    eq13 = kind.rate * math.sqrt(steps * logs) / kind.noise_multiplier
    out = {"paper_eq_13": eq13}
    if clients is not None:
        out["paper_eq_14"] = eq13 * math.sqrt(clients / planned.participation)
    return out

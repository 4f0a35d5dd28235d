"""The probability that a client is drawn for a round when spent budgets exclude other clients.

The cohort is the set of clients that take part in one round. A client whose privacy budget is spent
is no longer eligible for cohorts.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpfed.privacy.accounting.observers import participation_probability

Chances = tuple[tuple[float, int], ...]
"""Pairs (probability that a client is drawn in a round, number of rounds with this probability)."""


def fewest_eligible(
    clients: int, cohort: int, rounds: int, limits: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return pairs (fewest clients that can be eligible, number of consecutive rounds).

    A client whose privacy budget is spent is no longer eligible, so the others are drawn more
    often. The true number of eligible clients depends on who took part, which is secret. The
    privacy guarantee of a run therefore assumes the smallest possible number.

    limits  the number of rounds that each client's budget allows; None without budgets

    In the first t-1 rounds, cohorts of S clients had S(t-1) members in total. Most budgets are
    spent if these members were the clients with the smallest limits. A client spends a limit of L
    rounds in L rounds at least, because it is in a cohort once at most.
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
    """Return pairs (probability that a client is drawn in a round, number of such rounds).

    cohort     number of clients that are drawn in each round
    eligible   pairs (eligible clients, number of rounds), as `fewest_eligible` returns them
    colluding  number of clients that tell an outside observer when they were not drawn
    """
    return tuple(
        (1.0 if n <= cohort else participation_probability(cohort, n, min(colluding, n - 1)), count)
        for n, count in eligible
    )

"""The probability that a client is drawn for a cohort when spent budgets exclude other clients."""

from __future__ import annotations

from collections.abc import Sequence

from dpfed.privacy.accounting.observers import participation_probability

Chances = tuple[tuple[float, int], ...]
"""Pairs (probability that a client is drawn in a round, number of rounds with this probability)."""


def fewest_eligible(
    clients: int, cohort: int, rounds: int, limits: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return pairs (fewest clients that can be eligible, number of consecutive rounds).

    A client whose budget is spent is no longer eligible, so the others are drawn more often. The
    true number of eligible clients depends on who took part, which is secret. The privacy statement
    therefore uses the smallest possible number.

    limits  the number of rounds that each client's budget allows; None without budgets

    Before round t, the cohorts had S(t-1) places in t-1 rounds. The number of spent budgets is
    largest if the clients with the smallest limits took these places. A limit of L rounds cannot
    be spent in fewer than L rounds.
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

    eligible   pairs (eligible clients, number of rounds), as `fewest_eligible` returns them
    colluding  clients that tell the third party when they were not drawn
    """
    return tuple(
        (1.0 if n <= cohort else participation_probability(cohort, n, min(colluding, n - 1)), count)
        for n, count in eligible
    )

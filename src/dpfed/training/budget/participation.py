"""Choose the clients that take part in a round (the cohort), from public numbers only.

The public numbers are each client's requests so far, its privacy budget and its largest number of
rounds.
"""

from __future__ import annotations

import numpy as np

from dpfed.config.sections import CohortChoice


def eligible_clients(
    requests: np.ndarray, cap: int | None, limits: np.ndarray | None
) -> np.ndarray:
    """Return the numbers of the clients that may take part in another round.

    requests  number of rounds that each of N clients was asked for so far, answered or not, `[N]`
    cap       largest number of rounds of a client; None for no cap
    limits    number of rounds that the privacy budget allows each client, `[N]`; None for no budget
    """
    allowed = np.ones(len(requests), dtype=bool)
    if cap is not None:
        allowed &= requests < cap
    if limits is not None:
        allowed &= requests < limits
    return np.flatnonzero(allowed)


def choose_cohort(
    eligible: np.ndarray,
    requests: np.ndarray,
    size: int,
    choice: CohortChoice,
    rng: np.random.Generator,
) -> list[int]:
    """Return the sorted numbers of `size` eligible clients; of all of them if they are fewer.

    requests  number of rounds that each client was asked for so far
    choice    "balanced": take the clients with the fewest requests, and break ties at random;
              "uniform": ignore the requests
    """
    size = min(size, len(eligible))
    if choice == "uniform":
        chosen = rng.choice(eligible, size=size, replace=False)
    else:
        shuffled = rng.permutation(eligible)
        chosen = shuffled[np.argsort(requests[shuffled], kind="stable")][:size]
    return sorted(int(i) for i in chosen)

"""Choose the batch size of a private run: the smallest size whose noise is near the minimum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

# The chosen batch may have this much more noise than full batches, as a relative amount.
TOLERANCE = 0.05


def powers_of_two(largest: float) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`; at least 1."""
    powers = [1]
    while 2 * powers[-1] <= largest:
        powers.append(2 * powers[-1])
    return powers


def automatic_batch(noise: Callable[[float], float], records: float, limit: float) -> int:
    """Return the smallest power of two whose noise is at most 5 % above that of full batches.

    If there is none up to `limit`, return the largest power of two up to `limit`.

    noise    batch -> noise of the mean gradient; it falls as the batch grows
    records  records of a client, the size of a full batch
    limit    largest batch that may be chosen
    """
    tolerated = (1 + TOLERANCE) * noise(records)
    batches = powers_of_two(min(records, limit))
    first = bisect_left(batches, True, key=lambda batch: noise(batch) <= tolerated)
    return batches[min(first, len(batches) - 1)]

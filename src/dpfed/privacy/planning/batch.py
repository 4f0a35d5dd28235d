"""Choose the batch size of a private run: the smallest size whose noise is near the minimum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

# A chosen batch size may have at most this much more noise than a batch of all records (relative).
TOLERANCE = 0.05


def powers_of_two(largest: float) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`; at least 1."""
    powers = [1]
    while 2 * powers[-1] <= largest:
        powers.append(2 * powers[-1])
    return powers


def automatic_batch(noise: Callable[[float], float], records: float, limit: float) -> int:
    """Return the smallest batch size with at most 5 % more noise than a batch of all records.

    Only powers of two up to `limit` are considered. If none has so little noise, return the
    largest of them.

    noise    function from the batch size to the noise of the mean gradient; it falls as the batch
             grows
    records  number of records of a client
    limit    largest batch size that may be chosen
    """
    tolerated = (1 + TOLERANCE) * noise(records)
    batches = powers_of_two(min(records, limit))
    first = bisect_left(batches, True, key=lambda batch: noise(batch) <= tolerated)
    return batches[min(first, len(batches) - 1)]

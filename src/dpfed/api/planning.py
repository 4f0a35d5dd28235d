"""`dpfed.plan`: choose batch, rounds and noise of a federation before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from dpfed.api.words import python_words
from dpfed.errors import DpfedError
from dpfed.privacy.planning.federation import (
    MAX_RECORDS,
    FederationPlan,
    federation_of,
    plan_federation,
)
from dpfed.registry import releases_of


def plan(
    records: int | Sequence[int],
    epsilon: float,
    *,
    clients: int | None = None,
    cohort: int | None = None,
    rounds: int = 100,
    local_steps: int = 20,
    delta: float = 1e-5,
    max_records: int = MAX_RECORDS,
    algorithm: str = "dp-fedadamw",
    try_rounds: Sequence[int] = (),
    try_local_steps: Sequence[int] = (),
    plot: str | Path | None = None,
) -> FederationPlan:
    """Compare plans (batch, noise and rounds) for a federation of a given size; recommend one.

    Only the numbers that you pass are used, no records, so planning costs no privacy.

    Args:
        records: Records of each client: one number for all clients, or one number for each client.
        epsilon: Target epsilon against the server, for the client with the most rounds.
        clients: Number of clients, if `records` is one number.
        cohort: Clients in each round; default: all clients if there are at most 20, else a tenth.
        rounds: Rounds of the run.
        local_steps: Local steps of a client in a round.
        delta: Delta of the guarantee.
        max_records: Largest number of records, over all clients of a round, that your hardware can
            process in a local step.
        algorithm: Name of the algorithm; some use a batch for more than one noised sum.
        try_rounds: Other numbers of rounds to compare.
        try_local_steps: Other numbers of local steps to compare.
        plot: PNG or SVG file for a plot of the noise for each batch size.

    Returns:
        The plan. `print(plan)` shows it, `plan.table` is a data frame, and `plan.configuration` has
        the tables of a configuration.
    """
    numbers = {"rounds": rounds, "local_steps": local_steps, "epsilon": epsilon, "delta": delta}
    with python_words():
        releases = releases_of(algorithm)
        uses: dict[str, Any] = {"batches": releases.batches, "releases": releases.releases}
        uses |= {"algorithm": algorithm, "max_records": max_records}
        federation = federation_of(_sizes(records), clients, cohort, **numbers, **uses)
        found = plan_federation(federation, try_rounds, try_local_steps)
        if plot is not None:
            from dpfed.report.figures.plan_plot import noise_over_batch

            noise_over_batch(found, Path(plot))
    return found


def _sizes(records: int | Sequence[int]) -> list[int]:
    """Return the numbers of records as a list of Python numbers."""
    sizes = list(records) if isinstance(records, Iterable) else [records]
    if not all(isinstance(size, Integral) for size in sizes):
        raise DpfedError(f"records must be a whole number or a list of them, not {records!r:.60}")
    return [int(size) for size in sizes]

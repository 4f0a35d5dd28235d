"""A privacy plan from plain numbers, for those who ask what epsilon a setting would have."""

from __future__ import annotations

from typing import Protocol, cast

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.accounting.observers import View, participation_probability
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.published import show_setting


class Releases(Protocol):
    """What one local step takes from the oracle, as the algorithm declares it."""

    @property
    def batches(self) -> int: ...

    @property
    def releases(self) -> int: ...


def plan_from_numbers(
    *,
    records: int,
    batch: float,
    rounds: int,
    local_steps: int,
    sigma: float | None,
    target_epsilon: float | None,
    participation: float,
    delta: float,
    sampling: str,
    releases: Releases,
    view: str,
    clients: int | None,
    colluding: int,
) -> Planned:
    _refuse(records, batch, rounds, local_steps, participation, delta, sampling)
    rate = batch / records
    odds = participation
    if clients is not None:
        cohort = max(1, round(participation * clients))
        participation = participation_probability(cohort, clients)
        odds = participation_probability(cohort, clients, colluding)
    elif colluding:
        raise DpfedError("--colluding needs --clients, the number of clients there are")
    kind = cast(Sampling, sampling)
    if kind == "fixed_wor" and batch != int(batch):
        raise DpfedError(f"--batch {batch:g} must be a whole number with --sampling fixed_wor")
    if (sigma is None) == (target_epsilon is None):
        raise DpfedError("give exactly one of --sigma and --target-epsilon")
    if target_epsilon is not None:
        sigma = calibrate_sigma(
            rate=rate,
            local_steps=local_steps,
            rounds=rounds,
            target_epsilon=target_epsilon,
            delta=delta,
            participation=odds if view == "third_party" else participation,
            view=cast(View, view),
            sampling=kind,
            batches=releases.batches,
            releases=releases.releases,
        )
    if sigma is None or not sigma > 0:
        raise DpfedError(f"--sigma {sigma} must be > 0: without noise there is no privacy")
    step = Mechanism(kind, rate, sigma, releases.batches, releases.releases)
    return Planned((step,), local_steps, participation, ((odds, rounds),), delta, largest=records)


def _refuse(
    records: int,
    batch: float,
    rounds: int,
    local_steps: int,
    participation: float,
    delta: float,
    sampling: str,
) -> None:
    checks = (
        (records >= 1, f"--records {records} must be at least 1"),
        (0 < batch <= records, f"--batch {batch:g} must be > 0 and at most --records {records}"),
        (rounds >= 1, f"--rounds {rounds} must be at least 1"),
        (local_steps >= 1, f"--local-steps {local_steps} must be at least 1"),
        (0 < participation <= 1, f"--participation {participation:g} must be in (0, 1]"),
        (0 < delta < 1, f"--delta {show_setting(delta)} must be between 0 and 1"),
        (
            sampling in ("poisson", "fixed_wor"),
            f"--sampling {sampling} must be poisson or fixed_wor: no other has accounting",
        ),
    )
    for fine, sentence in checks:
        if not fine:
            raise DpfedError(sentence)

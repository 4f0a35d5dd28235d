"""Build a privacy plan from plain numbers, to compute its epsilon without configuration or data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.accounting.observers import (
    Rounds,
    View,
    capped,
    expected_rounds,
    participation_probability,
)
from dpfed.privacy.mechanism import Mechanism, Sampling
from dpfed.privacy.published import show_setting


@dataclass(frozen=True, kw_only=True)
class PlanNumbers:
    """Plain numbers that describe a privacy plan, such as options of the command line.

    Exactly one of `sigma` and `target_epsilon` is given.

    records         protected units of one client (a unit is a record, or all records of a person)
    batch           expected batch size; batch / records is the sampling rate
    sigma           noise multiplier
    target_epsilon  epsilon for which the noise multiplier is computed
    participation   fraction of the clients that take part in each round
    batches         batches in each local step
    releases        noised gradients that are released for each batch
    view            observer for whom the target epsilon holds, such as "server_worst"
    clients         number of clients; None if unknown
    colluding       number of clients that tell the third party (an observer who sees only the
                    global models) when they were not drawn
    max_rounds      largest number of rounds of a client; None for every round
    """

    records: int
    batch: float
    rounds: int
    local_steps: int
    sigma: float | None
    target_epsilon: float | None
    participation: float
    delta: float
    sampling: str
    batches: int
    releases: int
    view: str
    clients: int | None
    colluding: int
    max_rounds: int | None = None

    def planned(self) -> Planned:
        """Check the numbers, compute the noise multiplier if none is given, and return the plan."""
        self._refuse_impossible()
        participation = self.participation
        # Colluding clients tell a third party (an observer of the global models) when they were not
        # drawn. The other clients then have a higher probability to be drawn.
        third_party_probability = participation
        if self.clients is not None:
            cohort = max(1, round(participation * self.clients))
            participation = participation_probability(cohort, self.clients)
            third_party_probability = participation_probability(
                cohort, self.clients, self.colluding
            )
        cap = self._cap(participation)
        sigma = self.sigma
        if self.target_epsilon is not None:
            view = cast(View, self.view)
            probability = third_party_probability if view == "third_party" else participation
            rounds = Rounds(self._step(0.0), self.local_steps, self.rounds, probability)
            rounds = capped(view, rounds, cap)
            sigma = calibrate_sigma(rounds, self.target_epsilon, self.delta, view)
        if sigma is None or not sigma > 0:
            raise DpfedError(f"--sigma {sigma} must be > 0: without noise there is no privacy")
        return Planned(
            (self._step(sigma),),
            self.local_steps,
            participation,
            ((third_party_probability, self.rounds),),
            self.delta,
            largest=self.records,
            cap=cap,
        )

    def _cap(self, participation: float) -> int | None:
        """Return the cap: the largest number of rounds of one client in the run; None for no limit.

        Raise DpfedError if this number is too small for the given participation.
        """
        if self.max_rounds is None:
            return None
        needed = expected_rounds(self.rounds, participation)
        if self.max_rounds < needed:
            raise DpfedError(
                f"--max-rounds {self.max_rounds} is too small: with --participation "
                f"{participation:g} a client takes part in {needed} of {self.rounds} rounds on "
                f"average, so use {needed} or more, or a smaller --participation"
            )
        return min(self.max_rounds, self.rounds)

    def _step(self, sigma: float) -> Mechanism:
        rate = self.batch / self.records
        sampling = cast(Sampling, self.sampling)
        return Mechanism(sampling, rate, sigma, self.batches, self.releases)

    def _refuse_impossible(self) -> None:
        batch = f"--batch {self.batch:g}"
        share = f"--participation {self.participation:g}"
        checks = (
            (self.records >= 1, f"--records {self.records} must be at least 1"),
            (
                0 < self.batch <= self.records,
                f"{batch} must be > 0 and at most --records {self.records}",
            ),
            (self.rounds >= 1, f"--rounds {self.rounds} must be at least 1"),
            (self.local_steps >= 1, f"--local-steps {self.local_steps} must be at least 1"),
            (0 < self.participation <= 1, f"{share} must be in (0, 1]"),
            (0 < self.delta < 1, f"--delta {show_setting(self.delta)} must be between 0 and 1"),
            (
                self.sampling in ("poisson", "fixed_wor"),
                f"--sampling {self.sampling} must be poisson or fixed_wor: no other has accounting",
            ),
            (
                self.clients is not None or not self.colluding,
                "--colluding needs --clients, the number of clients there are",
            ),
            (
                self.sampling == "poisson" or self.batch == int(self.batch),
                f"{batch} must be a whole number with --sampling fixed_wor",
            ),
            (
                (self.sigma is None) != (self.target_epsilon is None),
                "give exactly one of --sigma and --target-epsilon",
            ),
        )
        for fine, sentence in checks:
            if not fine:
                raise DpfedError(sentence)

"""Compare privacy plans for a federation of a given size: batch sizes, cohorts and rounds.

A cohort is the set of clients that take part in one round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from dpfed.config.sections import CohortChoice
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.calibrate import calibrate_sigma, estimate_sigma
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.accounting.observers import Rounds
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Schedule
from dpfed.privacy.planning.batch import automatic_batch, powers_of_two
from dpfed.privacy.planning.recipe import METHOD, recipe
from dpfed.privacy.published import (
    show_delta,
    show_percent,
    show_score,
    show_setting,
    show_sigma,
)

if TYPE_CHECKING:
    import pandas as pd

HEAD = f"{'cohorts':10}{'batch':>8}{'sigma':>10}{'noise':>12}{'records computed':>19}"
# The table shows batches from the recommended batch divided by LARGEST_DIVISOR to the recommended
# batch times LARGEST_FACTOR.
LARGEST_DIVISOR = 8
LARGEST_FACTOR = 4
MAX_RECORDS = 2048
# If a recommended plan has more noise than this factor times the noise of batches of all records,
# its batch was limited by `max_records`. Without this limit the factor is at most 1.05.
LIMITED_NOISE = 1.06


@lru_cache(maxsize=512)
def _estimated_once(rounds: Rounds, epsilon: float, delta: float) -> float:
    return estimate_sigma(rounds, epsilon, delta)


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The size of a federation and its privacy target.

    records      number of protected units of each client
    cohort       number of clients in each round
    epsilon      target epsilon against the server, for the client with the most rounds
    max_records  largest number of records of all clients of a round in one local step
    batches      new batches in each local step of the algorithm
    releases     noised gradients released for each batch
    algorithm    name of the algorithm
    """

    records: tuple[int, ...]
    cohort: int
    rounds: int
    local_steps: int
    epsilon: float
    delta: float = 1e-5
    max_records: int = MAX_RECORDS
    batches: int = 1
    releases: int = 1
    algorithm: str = METHOD

    def __post_init__(self) -> None:
        check_delta(self.delta)
        checks = (
            (bool(self.records), "a federation needs at least one client"),
            (min(self.records, default=1) >= 1, "every client needs at least one record"),
            (
                1 <= self.cohort <= len(self.records),
                f"{self.cohort} clients in each round cannot be chosen from "
                f"{len(self.records)} clients",
            ),
            (self.rounds >= 1, f"{self.rounds} rounds are too few: use 1 or more"),
            (self.local_steps >= 1, f"{self.local_steps} local steps are too few: use 1 or more"),
            (
                self.epsilon > 0 and math.isfinite(self.epsilon),
                f"the target epsilon must be a number above 0, not {show_setting(self.epsilon)}",
            ),
            (
                self.max_records >= 1,
                f"{self.max_records} records in a local step are too few: use 1 or more",
            ),
        )
        for fine, sentence in checks:
            if not fine:
                raise DpfedError(sentence)

    @property
    def clients(self) -> int:
        return len(self.records)

    @property
    def mean_records(self) -> float:
        return float(np.mean(self.records))

    @property
    def largest_batch(self) -> float:
        """The largest batch size of a client that the plan may have.

        It is at most the mean number of records, and at most a client's part of `max_records`.
        """
        return min(self.mean_records, self.max_records / self.cohort)

    def schedule(self, choice: CohortChoice) -> Schedule:
        return Schedule(self.clients, self.cohort, self.rounds, self.local_steps, choice)

    def step(self, batch: float) -> Mechanism:
        """Return the mechanism of one local step, with 1 in place of its noise multiplier."""
        rate = min(1.0, batch / self.mean_records)
        return Mechanism("poisson", rate, 1.0, self.batches, self.releases)

    def sigma(self, choice: CohortChoice, batch: float, exact: bool = False) -> float:
        """Return the noise multiplier that the target epsilon needs; estimated unless `exact`."""
        rounds = self.schedule(choice).rounds_for(self.step(batch), "server_worst")
        find_sigma = calibrate_sigma if exact else _estimated_once
        return find_sigma(rounds, self.epsilon, self.delta)

    def noise(self, sigma: float, batch: float) -> float:
        """Return the noise of the whole run on one coordinate, in units of the clip norm.

        It is the noise's standard deviation in the average of all mean gradients of the run: one
        for each round, local step and client of the round.
        """
        rate = batch / self.mean_records
        mean_square = float(np.mean([(rate * size) ** -2 for size in self.records]))
        return sigma * math.sqrt(mean_square / (self.rounds * self.local_steps * self.cohort))

    def batch(self, choice: CohortChoice) -> int:
        """Return the automatic batch size, given how the clients of each round are chosen."""
        return automatic_batch(
            lambda batch: self.sigma(choice, batch) / batch, self.mean_records, self.largest_batch
        )


@dataclass(frozen=True)
class Choice:
    """One possible privacy plan of a federation.

    cohorts      how the clients of each round are chosen
    most_rounds  largest number of rounds of a client
    sigma        noise multiplier that the target epsilon needs
    noise        noise of the whole run on one coordinate, in units of the clip norm, as
                 `Federation.noise`
    computed     expected number of per-record gradients in the whole run
    """

    cohorts: CohortChoice
    rounds: int
    local_steps: int
    batch: float
    most_rounds: int
    sigma: float
    noise: float
    computed: float


@dataclass(frozen=True)
class FederationPlan:
    """Possible plans for a federation, and the recommended one.

    choices       plans that differ in the batch size, or in how each round's clients are chosen
    alternatives  plans with other numbers of rounds or local steps, each with its own batch size
    limits        sentences that say what limits the accuracy
    """

    federation: Federation
    recommended: Choice
    choices: tuple[Choice, ...]
    alternatives: tuple[Choice, ...] = ()
    limits: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(lines_of(self))

    @property
    def table(self) -> pd.DataFrame:
        """The plans as a data frame, `choices` before `alternatives`."""
        import pandas as pd

        rows = [asdict(choice) for choice in (*self.choices, *self.alternatives)]
        return pd.DataFrame(rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "recommended": asdict(self.recommended),
            "settings": self.configuration,
            "choices": [asdict(choice) for choice in self.choices],
            "alternatives": [asdict(choice) for choice in self.alternatives],
            "limits": list(self.limits),
        }

    @property
    def settings(self) -> dict[str, dict[str, float | int | str]]:
        """The numbers of the recommended plan as tables of a configuration."""
        federation = self.federation
        return {
            "privacy": {
                "target_epsilon": federation.epsilon,
                "delta": federation.delta,
                "batch": self.recommended.batch,
            },
            "run": {
                "rounds": federation.rounds,
                "local_steps": federation.local_steps,
                "participation": federation.cohort / federation.clients,
                "cohort_choice": self.recommended.cohorts,
            },
        }

    @property
    def configuration(self) -> dict[str, dict[str, Any]]:
        """The recommended configuration: `settings`, and the other settings of DP-FedAdamW."""
        tables: dict[str, dict[str, Any]] = {"algorithm": {"name": self.federation.algorithm}}
        if self.federation.algorithm == METHOD:
            tables = recipe()
        for section, keys in self.settings.items():
            tables[section] = {**tables.get(section, {}), **keys}
        return tables


def federation_of(
    records: Sequence[int], clients: int | None, cohort: int | None, **numbers: Any
) -> Federation:
    """Return the federation with these numbers, and with default values for numbers that are None.

    records  number of records of each client; a single number holds for every client
    clients  number of clients
    cohort   clients in each round; by default all of up to 20 clients, else a tenth
    numbers  further fields of `Federation`
    """
    if clients is not None and len(records) not in (1, clients):
        raise DpfedError(f"{len(records)} numbers of records were given for {clients} clients")
    if clients is None and len(records) == 1:
        raise DpfedError("give the number of clients, or the records of each client")
    sizes = tuple(records) * clients if len(records) == 1 and clients else tuple(records)
    usual = len(sizes) if len(sizes) <= 20 else round(len(sizes) / 10)
    return Federation(records=sizes, cohort=usual if cohort is None else cohort, **numbers)


def choice_of(
    federation: Federation, cohorts: CohortChoice, batch: float, exact: bool = False
) -> Choice:
    """Return one possible plan for the federation; its sigma is an estimate unless `exact`.

    cohorts  how the clients of each round are chosen
    """
    sigma = federation.sigma(cohorts, batch, exact)
    return Choice(
        cohorts,
        federation.rounds,
        federation.local_steps,
        batch,
        federation.schedule(cohorts).most_rounds,
        sigma,
        federation.noise(sigma, batch),
        batch * federation.cohort * federation.rounds * federation.local_steps,
    )


def plan_federation(
    federation: Federation, rounds: Sequence[int] = (), local_steps: Sequence[int] = ()
) -> FederationPlan:
    """Return the possible plans of a federation, computed from public numbers only.

    rounds       other numbers of rounds to compare
    local_steps  other numbers of local steps to compare
    """
    batch = federation.batch("balanced")
    recommended = choice_of(federation, "balanced", batch, exact=True)
    choices = []
    for size in _batches_around(batch, federation.mean_records):
        for cohorts in _cohorts(federation):
            known = (cohorts, size) == ("balanced", batch)
            choices.append(recommended if known else choice_of(federation, cohorts, size))
    others = [replace(federation, rounds=count) for count in rounds]
    others += [replace(federation, local_steps=count) for count in local_steps]
    alternatives = [choice_of(other, "balanced", other.batch("balanced")) for other in others]
    return FederationPlan(
        federation,
        recommended,
        tuple(choices),
        tuple(alternatives),
        tuple(_limits(federation, recommended)),
    )


def _cohorts(federation: Federation) -> tuple[CohortChoice, ...]:
    # If all clients take part in every round, "balanced" and "uniform" are the same.
    return ("balanced", "uniform") if federation.cohort < federation.clients else ("balanced",)


def _batches_around(batch: int, records: float) -> list[float]:
    powers = powers_of_two(LARGEST_FACTOR * batch)
    return [*(b for b in powers if LARGEST_DIVISOR * b >= batch and b < records), records]


def _limits(federation: Federation, recommended: Choice) -> list[str]:
    """Return sentences that say what limits the accuracy of the recommended plan."""
    smallest = min(federation.records)
    full = federation.mean_records
    least = choice_of(federation, recommended.cohorts, full)
    found = [
        f"With {smallest:,} records at the smallest client, epsilon "
        f"{show_setting(federation.epsilon)} needs sigma {show_sigma(recommended.sigma)} at batch "
        f"{recommended.batch:g}. Full batches would have "
        f"{show_percent(least.noise / recommended.noise, 0)} % of the noise."
    ]
    if federation.largest_batch < full and recommended.noise > LIMITED_NOISE * least.noise:
        found.append(
            f"Computing limits this plan: a cohort may have at most {federation.max_records:,} "
            "records in a local step. More would lower the noise."
        )
    twice = choice_of(
        replace(federation, epsilon=2 * federation.epsilon), recommended.cohorts, full
    )
    found.append(
        "Twice the records at every client would halve the noise; twice the epsilon would leave "
        f"{show_percent(twice.noise / least.noise, 0)} % of it."
    )
    if federation.delta * max(federation.records) >= 0.1:
        found.append(
            f"Delta {show_delta(federation.delta)} is large for {max(federation.records):,} "
            "records: use less than a tenth of 1 / records."
        )
    return found


def lines_of(plan: FederationPlan) -> list[str]:
    """Return the plan as lines of text: a table, sentences on limits, and a configuration."""
    federation = plan.federation
    own = plan.recommended
    lines = [
        f"{federation.clients} clients, {federation.cohort} in each of {federation.rounds} rounds "
        f"of {federation.local_steps} local steps; epsilon {show_setting(federation.epsilon)} "
        f"at delta {show_delta(federation.delta)}",
        "",
        HEAD,
        *(_row(choice, choice is own) for choice in plan.choices),
        "noise: of the whole run on one coordinate of the mean gradient, in units of the clip norm",
    ]
    if len({choice.cohorts for choice in plan.choices}) > 1:
        lines.append(
            f"balanced: a client takes part in at most {own.most_rounds} rounds; "
            f"uniform: possibly in all {federation.rounds}"
        )
    if plan.alternatives:
        lines += ["", f"{'rounds':>8}{'steps':>8}  {HEAD}"]
        lines += [f"{c.rounds:8}{c.local_steps:8}  {_row(c)}" for c in plan.alternatives]
    text = tomli_w.dumps(plan.configuration).rstrip()
    return [*lines, "", *plan.limits, "", "Recommended; paste this into your file:", "", text]


def _row(choice: Choice, recommended: bool = False) -> str:
    mark = "  <- recommended" if recommended else ""
    return (
        f"{choice.cohorts:10}{choice.batch:8g}{show_sigma(choice.sigma):>10}"
        f"{show_score(choice.noise, 6):>12}{round(choice.computed):19,}{mark}"
    )

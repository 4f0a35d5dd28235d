"""The privacy statement as an object, built from a run's ledger, result and configuration.

The statement may be published. It holds planned figures only: no seed, no cohort, and nothing about
a single client. `schema.json` beside this file describes its JSON form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import NOT_COVERED, PUBLIC, UNCOUNTED, Planned
from dpfed.privacy.accounting.tradeoff import CUTOFF, attack_rates, largest_mu
from dpfed.training.budget.recorded_spending import (
    RecordedSpending,
    is_run,
    read_recorded_spending,
)
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.files import read_result, read_settings

FORMAT = 1
SCHEMA = Path(__file__).with_name("schema.json")
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
TUNING = "epsilon excludes any choice of settings on these data"
QUESTIONS = "docs/statement.md answers the questions of NIST SP 800-226"
UNPROTECTED = "NO PRIVACY: this model was trained without differential privacy"
NOT_FOR_RELEASE = "NOT FOR RELEASE: the noise was seeded, so whoever knows the seed can remove it"
NOT_COUNTED = f"NOT ALL COUNTED: {UNCOUNTED}"
SERVER_SEES = "every message, and who took part"
THIRD_PARTY_SEES = "the global models only"
THIRD_PARTY_CONDITION = "it holds while nobody outside knows who took part"


@dataclass(frozen=True)
class Observer:
    """The epsilon against one observer, what the observer sees, and when the epsilon holds."""

    name: str
    sees: str
    epsilon: float
    condition: str


@dataclass(frozen=True)
class Mechanics:
    """The released mechanism. Rates and noise multipliers are pairs (least, greatest)."""

    sampling: str
    rate: tuple[float, float]
    noise_multiplier: tuple[float, float]
    batches: int
    releases: int
    clip: float | None
    clip_mode: str | None
    local_steps: int
    rounds: int


@dataclass(frozen=True)
class Accountant:
    """The accountant of epsilon, and the Renyi epsilon that must not be smaller, if finite."""

    name: str
    check: str
    check_epsilon: float | None


@dataclass(frozen=True)
class Participation:
    """The choice of clients, the cap on a client's rounds, and the rounds that epsilon counts."""

    clients: int
    share: float
    client_choice: str
    max_rounds_per_client: int | None
    counted_rounds: int


@dataclass(frozen=True)
class Mu:
    """The Gaussian-DP mu. `value` is None for Renyi accounting, and if no mu is large enough.

    It is the smallest mu for which the Gaussian mechanism has at least the run's delta(epsilon),
    wherever that is >= `cutoff`.
    """

    value: float | None
    cutoff: float


@dataclass(frozen=True)
class Attack:
    """The largest true-positive rate of any attacker at one false-positive rate."""

    false_positive_rate: float
    true_positive_rate: float


@dataclass(frozen=True)
class Delta:
    """The delta of the guarantee, and delta times numbers of protected units.

    largest_client, all_records  units of the largest client; units of all, or an upper bound
    times_...                    delta times this number; None if the number is unknown
    """

    value: float
    largest_client: int | None
    times_largest_client: float | None
    all_records: int | None
    times_all_records: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Guarantee:
    """The part of a statement that a run without privacy does not have."""

    unit: str
    adjacency: str
    observers: tuple[Observer, ...]
    delta: Delta
    mechanism: Mechanics
    accountant: Accountant
    participation: Participation
    mu: Mu
    attack: tuple[Attack, ...]
    earlier_releases: int
    assumed_public: str
    not_covered: str


@dataclass(frozen=True)
class Statement:
    """The privacy statement of a run.

    notices      reasons why the statement promises less than it seems; they come first
    release      the release note of the run
    guarantee    the figures and their conditions; None without privacy
    algorithm    name of the algorithm
    software     versions of dpfed, Python and the libraries, by name
    ledger_head  hash of the last row of the run's ledger; None if the run has no ledger
    """

    notices: tuple[str, ...]
    release: str
    guarantee: Guarantee | None
    algorithm: str | None
    software: Mapping[str, str]
    ledger_head: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the statement as JSON values, as `schema.json` describes them."""
        # Write and read JSON, because this turns tuples into lists.
        found = json.loads(json.dumps(asdict(self), allow_nan=False))
        return {"format": FORMAT, **found, "questions": QUESTIONS}


def statement_of_run(folder: Path) -> Statement:
    """Verify the ledger of a run and return the run's statement."""
    if not is_run(folder):
        raise DpfedError(f"{folder} is not the folder of a run: a statement describes a run")
    result = read_result(folder)
    private = result.get("release") != NO_PRIVACY
    spending = read_recorded_spending(folder) if private else None
    return statement_of(spending, result, read_settings(folder) or {})


def statement_of(
    spending: RecordedSpending | None, result: Mapping[str, Any], settings: Mapping[str, Any]
) -> Statement:
    """Return the statement of a run.

    spending  the run's spending, from its ledger; None for a run without privacy
    result    the content of run.json; only its public values are used
    settings  the configuration as nested tables
    """
    release = str(result.get("release", ""))
    notices = []
    if spending is None:
        notices.append(UNPROTECTED)
    elif spending.seeded or release.startswith(SEEDED):
        notices.append(NOT_FOR_RELEASE)
    if spending is not None and spending.planned.uncounted:
        notices.append(NOT_COUNTED)
    algorithm = result.get("algorithm")
    return Statement(
        notices=tuple(notices),
        release=release,
        guarantee=None if spending is None else _guarantee(spending, settings),
        algorithm=None if algorithm is None else str(algorithm),
        software=_software(result),
        ledger_head=None if spending is None else spending.head,
    )


def _guarantee(spending: RecordedSpending, settings: Mapping[str, Any]) -> Guarantee:
    planned = spending.realised
    first = planned.kinds[0]
    mu, attack = _tradeoff(planned)
    return Guarantee(
        unit=planned.unit,
        adjacency=first.adjacency,
        observers=_observers(spending),
        delta=_delta(planned, spending.records),
        mechanism=_mechanics(planned, _section(settings, "privacy")),
        accountant=Accountant(
            name="PLD" if first.sampling == "poisson" else "RDP",
            check="RDP",
            check_epsilon=_finite(planned.rdp_server_worst),
        ),
        participation=_participation(spending, _section(settings, "run")),
        mu=mu,
        attack=attack,
        earlier_releases=sum(steps for _, steps in planned.prior),
        assumed_public=PUBLIC,
        not_covered=f"{NOT_COVERED}; {TUNING}",
    )


def _observers(spending: RecordedSpending) -> tuple[Observer, ...]:
    holder = f"it holds for {spending.realised.worst_client}"
    server = Observer("server", SERVER_SEES, spending.server_worst, holder)
    condition = spending.void or THIRD_PARTY_CONDITION
    return server, Observer("third party", THIRD_PARTY_SEES, spending.third_party, condition)


def _delta(planned: Planned, records: int | None) -> Delta:
    largest = planned.largest
    return Delta(
        value=planned.delta,
        largest_client=largest,
        times_largest_client=None if largest is None else _times(planned.delta, largest),
        all_records=records,
        times_all_records=None if records is None else _times(planned.delta, records),
        warnings=tuple(planned.warnings),
    )


def _times(delta: float, units: int) -> float:
    """Return delta times units in decimal numbers, so that 1e-05 times 179 is exactly 0.00179."""
    return float(Decimal(repr(delta)) * units)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mechanics(planned: Planned, privacy: Mapping[str, Any]) -> Mechanics:
    kinds = planned.kinds
    rates = [kind.rate for kind in kinds]
    noise = [kind.noise_multiplier for kind in kinds]
    clip = privacy.get("clip")
    mode = privacy.get("clip_mode")
    return Mechanics(
        sampling=kinds[0].sampling,
        rate=(min(rates), max(rates)),
        noise_multiplier=(min(noise), max(noise)),
        batches=kinds[0].batches,
        releases=kinds[0].releases,
        clip=_finite(float(clip)) if isinstance(clip, int | float) else None,
        clip_mode=mode if isinstance(mode, str) else None,
        local_steps=planned.local_steps,
        rounds=planned.rounds,
    )


def _participation(spending: RecordedSpending, run: Mapping[str, Any]) -> Participation:
    """Return the participation; a configuration without `cohort_choice` has uniform cohorts.

    The cap and the counted rounds come from the plan that epsilon is computed from.
    """
    planned = spending.realised
    _, steps = planned.histories[0][-1]
    return Participation(
        clients=spending.clients,
        share=planned.participation,
        client_choice=str(run.get("cohort_choice", "uniform")),
        max_rounds_per_client=planned.cap,
        counted_rounds=-(-steps // planned.local_steps),
    )


@lru_cache(maxsize=64)
def _tradeoff(planned: Planned) -> tuple[Mu, tuple[Attack, ...]]:
    """Return mu and the attack rates against the server's view, the worst over all mechanisms."""
    histories = planned.histories
    rates = attack_rates(histories, FALSE_POSITIVE_RATES)
    attack = tuple(map(Attack, FALSE_POSITIVE_RATES, rates))
    return Mu(_finite(largest_mu(histories)), CUTOFF), attack


def _software(result: Mapping[str, Any]) -> dict[str, str]:
    versions = result.get("versions")
    found = dict(versions) if isinstance(versions, Mapping) else {}
    if "python" in result:
        found["python"] = result["python"]
    return {str(name): str(version) for name, version in found.items()}


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = settings.get(name)
    return table if isinstance(table, Mapping) else {}


def attack_of(planned: Planned) -> tuple[Attack, ...]:
    """Return the attack rates of a plan against the server's view."""
    return _tradeoff(planned)[1]


def write_statement(statement: Statement, path: Path, for_release: bool = False) -> None:
    """Write the statement as JSON; `for_release` leaves the permissions to the umask."""
    write_json(statement.as_dict(), path, for_release)


def write_json(values: Mapping[str, Any], path: Path, for_release: bool = False) -> None:
    """Write JSON values as a file; `for_release` leaves the permissions to the umask."""
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    write_file(path, lambda file: file.write(text.encode()), for_release=for_release)

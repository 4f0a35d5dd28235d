"""Build the privacy statement of a run from the run's ledger, result and configuration.

The statement says which epsilon the run guarantees, and under which conditions. It may be
published: it contains no seed, no names of clients that took part, and no number of a single
client. `schema.json` beside this file describes its JSON form.
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
    """An observer of training: what it sees, its epsilon, and the condition for this epsilon."""

    name: str
    sees: str
    epsilon: float
    condition: str


@dataclass(frozen=True)
class Mechanics:
    """The mechanism that protects the data: its sampling, noise, clipping and numbers of steps.

    Sampling rates and noise multipliers are pairs (smallest, largest) over all clients.
    """

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
    """The method that computed epsilon, and a second method that checks it.

    name           the accountant of epsilon: "PLD" (privacy-loss distributions) or "RDP" (Renyi)
    check          the accountant of the check, "RDP"
    check_epsilon  epsilon of the check, which must not be below the first epsilon; None if infinite
    """

    name: str
    check: str
    check_epsilon: float | None


@dataclass(frozen=True)
class Participation:
    """How often clients take part in rounds.

    clients                number of all clients
    share                  fraction of the clients that take part in a round
    client_choice          how these clients are chosen: "uniform" or "balanced"
    max_rounds_per_client  most rounds in which a client may take part; None without such a limit
    counted_rounds         number of rounds of one client that epsilon covers
    """

    clients: int
    share: float
    client_choice: str
    max_rounds_per_client: int | None
    counted_rounds: int


@dataclass(frozen=True)
class Mu:
    """The privacy loss of a run as one number, mu of Gaussian differential privacy.

    value   the smallest mu whose Gaussian mechanism has at least the run's delta at every epsilon;
            None if the accountant is Renyi, or if no mu is large enough
    cutoff  epsilons at which the run's delta is below this number are left out
    """

    value: float | None
    cutoff: float


@dataclass(frozen=True)
class Attack:
    """The success of the best attacker who guesses whether a record was used for training.

    It is the largest true-positive rate that any attacker can have at one false-positive rate.
    """

    false_positive_rate: float
    true_positive_rate: float


@dataclass(frozen=True)
class Delta:
    """The delta of the guarantee, and its products with numbers of protected units.

    A protected unit is one record, or all records of one person.

    largest_client        number of units of the largest client; None if unknown
    times_largest_client  delta times this number
    all_records           number of units of all clients, or an upper bound; None if unknown
    times_all_records     delta times this number
    warnings              sentences that say if delta is too large
    """

    value: float
    largest_client: int | None
    times_largest_client: float | None
    all_records: int | None
    times_all_records: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Guarantee:
    """The guarantee in a privacy statement: epsilons, delta, and the conditions for both.

    The statement of a run without privacy has no guarantee.
    """

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

    notices      warnings to show first: the run has no privacy, its noise was seeded, or earlier
                 use of the records is not counted
    release      sentence of the run's result on whether the model may be released
    guarantee    epsilons, delta and their conditions; None for a run without privacy
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
        # Convert to JSON and back, which turns tuples into lists.
        found = json.loads(json.dumps(asdict(self), allow_nan=False))
        return {"format": FORMAT, **found, "questions": QUESTIONS}


def statement_of_run(folder: Path) -> Statement:
    """Read a run's folder, verify its ledger, and return the privacy statement of the run.

    A run without privacy, or on a server whose clients are real, has no ledger to verify.
    """
    if not is_run(folder):
        raise DpfedError(f"{folder} is not the folder of a run: a statement describes a run")
    result = read_result(folder)
    private = result.get("release") != NO_PRIVACY
    spending = read_recorded_spending(folder) if private else None
    return statement_of(spending, result, read_settings(folder) or {})


def statement_of(
    spending: RecordedSpending | None, result: Mapping[str, Any], settings: Mapping[str, Any]
) -> Statement:
    """Return the privacy statement of a run from what its folder contains.

    spending  privacy that the run has spent; None for a run without privacy
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
    """Return delta times units, computed in decimal: 1e-05 times 179 is exactly 0.00179."""
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
    """Return how often clients take part, from the plan that epsilon is computed from.

    run  the section `run` of the configuration; without `cohort_choice` the choice was "uniform"
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
    """Return the largest mu and the highest attack rates, given all that the server sees.

    The largest and the highest are taken over the mechanisms of all clients.
    """
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
    """Return the highest success rates of attackers who see all that the server sees.

    An attacker guesses if a record was used. There is one entry for each of FALSE_POSITIVE_RATES.
    """
    return _tradeoff(planned)[1]


def write_statement(statement: Statement, path: Path, for_release: bool = False) -> None:
    """Write the statement as a JSON file.

    for_release  False: only the owner can read the file. True: the umask sets its permissions.
    """
    write_json(statement.as_dict(), path, for_release)


def write_json(values: Mapping[str, Any], path: Path, for_release: bool = False) -> None:
    """Write values as a JSON file.

    for_release  False: only the owner can read the file. True: the umask sets its permissions.
    """
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    write_file(path, lambda file: file.write(text.encode()), for_release=for_release)

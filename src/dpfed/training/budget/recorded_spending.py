"""What a run has spent, read back from its folder: the ledger is the authority, nothing is recomputed from settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.guarantee import Planned, chances
from dpfed.privacy.accounting.observers import participation_probability
from dpfed.privacy.accounting.pld import History, epsilon
from dpfed.privacy.accounting.population import population_epsilon
from dpfed.privacy.ledger.ledger import Client, Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.training.budget.spending import stated_rounds
from dpfed.training.run_folder.files import (
    COHORTS,
    CONFIG,
    LEDGER,
    RESULT,
    read_result,
    read_settings,
)

NO_PRIVACY, SEEDED = "no privacy", "simulation"  # how the release notes of such runs begin
OWN_LEDGER = "ledger.db"  # of a real client, in its state folder
FEW = 50  # so many different histories are accounted for one by one, more by the population's bound


@dataclass(frozen=True)
class RecordedSpending:
    """Spending of a run: one epsilon per client (of all N), and the statement it was made under.

    void  why the third-party figure does not hold, or None
    """

    planned: Planned
    clients: int
    epsilons: np.ndarray
    rows: int
    seeded: bool
    void: str | None
    most_rounds: int = 0  # of any client, every attempt counted
    served: bool = False  # of a server's run, whose clients are real

    @property
    def realised(self) -> Planned:
        """The plan as it came out: where attempts were repeated, a client may have released more than T rounds."""
        if self.most_rounds <= self.planned.rounds:
            return self.planned
        return replace(self.planned, chances=((1.0, self.most_rounds),))

    @property
    def server_max(self) -> float:
        return float(self.epsilons.max(initial=0.0))

    @property
    def server_worst(self) -> float:
        """Repeated attempts can have cost more than the plan foresaw."""
        return max(self.planned.server_worst, self.server_max)

    @property
    def third_party(self) -> float:
        return self.server_worst if self.void else self.planned.third_party


@dataclass(frozen=True)
class OwnSpending:
    """What one real client has spent, over all its runs. Rows of test mode are void and cost nothing."""

    client: str
    epsilon: float
    delta: float
    runs: int
    rows: int
    void: int


def own_ledger(path: Path) -> Path | None:
    """The ledger in a client's state folder, or the file itself; None if it is neither."""
    path = path / OWN_LEDGER if path.is_dir() else path
    return path if path.is_file() and path.name == OWN_LEDGER else None


def own_spending(path: Path) -> OwnSpending:
    """Verifies the ledger's whole chain first; may be asked while the client is at work."""
    with Ledger.open(path, readonly=True) as ledger:
        ledger.verify()
        if ledger.meta.get("kind") != "client":
            raise DpfedError(f"{path} is not the ledger of a client: give a client's state folder")
        name, delta = str(ledger.meta["owner"]), float(ledger.meta["delta"])
        rows = list(ledger.rows())
        spent = (
            epsilon(ledger.history(name), delta).value
            if any(not row.charge.void for row in rows)
            else 0.0
        )
    void = sum(row.charge.void for row in rows)
    return OwnSpending(name, spent, delta, len({row.run for row in rows}), len(rows), void)


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).exists()


def read_recorded_spending(folder: Path, colluding: int = 0) -> RecordedSpending:
    """Verifies the ledger's whole chain, then accounts for every client."""
    result = _result(folder)
    if result.get("release") == NO_PRIVACY:
        raise DpfedError(
            f"{folder} is a run without privacy: nothing in it is protected, so there is no epsilon"
        )
    if (folder / COHORTS).exists():
        from dpfed.training.budget.served_spending import (
            served_spending,  # it puts together what this module is a part of
        )

        seeded = str(result.get("release")).startswith(SEEDED)
        return served_spending(folder, seeded, colluding, result.get("sigma"))
    with Ledger.open(folder / LEDGER, run=str(result["run"]), readonly=True) as ledger:
        head = ledger.verify()
        meta = ledger.meta
        histories = ledger.histories()
        taken = ledger.participation()
        cohorts, seeded = set(), str(result.get("release")).startswith(SEEDED)
        eligible = _eligible(folder, ledger)
        for row in ledger.rows():
            if row.charge.void:
                continue
            cohorts.add(
                (row.charge.round, row.txn)
            )  # two attempts at a round may have no client in common
            seeded = seeded or row.charge.noise == "seeded"
        repeated = len(cohorts) > len({t for t, _ in cohorts})
    if not histories:
        raise DpfedError(f"{folder} has an empty ledger: nothing was released yet")
    planned = replace(
        _planned(folder, meta, eligible, colluding), largest=_largest(folder, result, meta)
    )
    clients = int(meta["clients"])
    epsilons = _epsilons(histories, taken, planned, clients)
    return RecordedSpending(
        planned=planned,
        clients=clients,
        epsilons=epsilons,
        most_rounds=math.ceil(
            max(sum(n for _, n in h) for h in histories.values()) / planned.local_steps
        ),
        rows=head.rows,
        seeded=seeded,
        void="a round was attempted more than once, so it equals the server's figure"
        if repeated
        else None,
    )


def _result(folder: Path) -> dict[str, Any]:
    found = read_result(folder)
    if isinstance(found.get("run"), str):
        return found
    raise DpfedError(
        f"{folder / RESULT} does not name the run, so its ledger cannot be trusted to be its own"
    )


def _largest(folder: Path, result: Mapping[str, Any], meta: Mapping[str, Any]) -> int | None:
    """Return the units of the largest client; an estimate for a run that does not state them."""
    stated = result.get("largest_client")
    if isinstance(stated, int) and stated > 0:
        return stated
    try:
        batch = float((read_settings(folder) or {})["privacy"]["batch"])
        # A batch is the rate times a client's size, or the mean size where clients share a rate.
        return max(1, math.floor(batch / min(float(rate) for rate, _ in meta["kinds"])))
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _eligible(folder: Path, ledger: Ledger) -> list[tuple[int, int]]:
    try:
        return stated_rounds(ledger)
    except (KeyError, TypeError, ValueError):
        raise _no_plan(folder) from None


def _no_plan(folder: Path) -> DpfedError:
    return DpfedError(
        f"the ledger of {folder} does not state its plan: it was not written by a run"
    )


def _planned(
    folder: Path, meta: Mapping[str, Any], eligible: list[tuple[int, int]], colluding: int
) -> Planned:
    """The statement as it was fixed before round 1, with the rounds that were added since; the ledger's chain protects it from being edited."""
    try:
        kinds = [
            Mechanism(meta["sampling"], q, s, meta["batches"], meta["releases"])
            for q, s in meta["kinds"]
        ]
        cohort, clients = int(meta["cohort"]), int(meta["clients"])
        share = participation_probability(cohort, clients)
        odds = chances(cohort, eligible, colluding)
        prior = tuple((Mechanism(*kind), int(steps)) for *kind, steps in meta["prior"])
        steps, delta, unit = int(meta["local_steps"]), float(meta["delta"]), str(meta["unit"])
        return Planned(
            tuple(kinds), steps, share, odds, delta, unit, prior, bool(meta["uncounted"])
        )
    except (KeyError, TypeError, ValueError):
        raise _no_plan(folder) from None


def _epsilons(
    histories: Mapping[Client, History], taken: Mapping[Client, int], planned: Planned, clients: int
) -> np.ndarray:
    """Server's view of each client, by its number; who never took part has spent nothing but what was spent before."""
    prior = planned.prior
    out = np.full(clients, epsilon(prior, planned.delta).value)
    who = [int(client) for client in histories]
    keys = [(*prior, *history) for history in histories.values()]
    rounds = [taken[client] for client in histories]
    steps = planned.local_steps
    simple = all(
        len(key) == 1 and key[0][1] == steps * n for key, n in zip(keys, rounds, strict=True)
    )
    first = keys[0][0][0]
    if len(set(keys)) > FEW and simple and first.sampling == "poisson":
        kinds = [key[0][0] for key in keys]
        out[who] = population_epsilon(
            [m.rate for m in kinds],
            rounds,
            steps,
            [m.noise_multiplier for m in kinds],
            planned.delta,
            batches=first.batches,
            releases=first.releases,
        )
    else:
        known = {key: epsilon(key, planned.delta).value for key in set(keys)}
        out[who] = [known[key] for key in keys]
    return out

"""What a run has spent, read back from its folder: the ledger is the authority, nothing is recomputed from settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.engine.folder import LEDGER, METRICS, RESULT
from dpfed.errors import DpfedError
from dpfed.privacy.accounting import History, epsilon
from dpfed.privacy.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.population import population_epsilon
from dpfed.privacy.statement import Planned
from dpfed.privacy.views import Rounds, participation_probability, third_party_rounds_epsilon

FEW = 50  # so many different histories are accounted for one by one, more by the population's bound


@dataclass(frozen=True)
class Accounts:
    """Spending of a run: one epsilon per client (of all N), and the plan it followed."""

    planned: Planned
    clients: int
    cohort: int
    epsilons: np.ndarray
    third_party: float
    rows: int
    seeded: bool
    void_third_party: str | None

    @property
    def server_max(self) -> float:
        return float(self.epsilons.max(initial=0.0))


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / LEDGER).exists()


def read_accounts(folder: Path, colluding: int = 0) -> Accounts:
    """Verifies the ledger's whole chain, then accounts for every client."""
    with Ledger.open(folder / LEDGER, run=_run_name(folder), readonly=True) as ledger:
        head = ledger.verify()
        meta = ledger.meta
        histories = ledger.histories()
        taken = ledger.participation()
        seeded = any(row.charge.noise == "seeded" for row in _first(ledger))
    kinds = {mechanism for history in histories.values() for mechanism, _ in history}
    if not kinds:
        raise DpfedError(f"{folder} has an empty ledger: nothing was released yet")
    try:
        n, cohort, rounds, steps = (int(meta[key]) for key in ("clients", "cohort", "rounds", "local_steps"))
        delta, unit = float(meta["delta"]), str(meta["unit"])
    except (KeyError, TypeError, ValueError):
        raise DpfedError(
            f"the ledger of {folder} does not say which plan it belongs to: it was not written by a run"
        ) from None
    worst = _dominating(kinds)
    planned = Planned(worst, steps, rounds, participation_probability(cohort, n), delta, unit)
    third, void = _third_party(folder, planned, cohort, n, colluding)
    epsilons = _epsilons(list(histories.values()), list(taken.values()), steps, delta, n)
    return Accounts(
        planned, n, cohort, epsilons, min(third, float(epsilons.max())) if void else third, head.rows, seeded, void
    )


def _run_name(folder: Path) -> str:
    try:
        return str(json.loads((folder / RESULT).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DpfedError(
            f"{folder / RESULT} does not name the run, so its ledger cannot be trusted to be its own"
        ) from None


def _first(ledger: Ledger) -> list[Any]:
    for row in ledger.rows():
        return [row]
    return []


def _dominating(kinds: set[Mechanism]) -> Mechanism:
    """At least as costly as any mechanism in the ledger."""
    some = next(iter(kinds))
    return replace(
        some,
        rate=max(m.rate for m in kinds),
        noise_multiplier=min(m.noise_multiplier for m in kinds),
        batches=max(m.batches for m in kinds),
        releases=max(m.releases for m in kinds),
    )


def _epsilons(histories: Sequence[History], taken: Sequence[int], steps: int, delta: float, clients: int) -> np.ndarray:
    """Server's view of each client; clients that never took part have spent nothing."""
    out = np.zeros(clients)
    keys = [tuple(history) for history in histories]
    simple = all(len(key) == 1 and key[0][1] == steps * n for key, n in zip(keys, taken, strict=True))
    first = keys[0][0][0]
    if len(set(keys)) > FEW and simple and first.sampling == "poisson":
        kinds = [key[0][0] for key in keys]
        out[: len(keys)] = population_epsilon(
            [m.rate for m in kinds],
            taken,
            steps,
            [m.noise_multiplier for m in kinds],
            delta,
            batches=first.batches,
            releases=first.releases,
        )
    else:
        known = {key: epsilon(key, delta).value for key in set(keys)}
        out[: len(keys)] = [known[key] for key in keys]
    return out


def _third_party(folder: Path, planned: Planned, cohort: int, clients: int, colluding: int) -> tuple[float, str | None]:
    """SPEC 6.2(b) with the clients each round was drawn from; without that record the figure is void."""
    drawn: Counter[tuple[int, int]] = Counter()
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
        for line in lines:
            row = json.loads(line)
            if row["round"] > 0:
                drawn[int(row["cohort"]), int(row["eligible"])] += 1
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf"), "the record of who could have taken part is missing, so it equals the server's figure"
    ahead = planned.rounds - sum(drawn.values())
    if ahead > 0:
        drawn[cohort, clients] += ahead
    history = [
        Rounds(planned.step, planned.local_steps, count, participation_probability(s, n, min(colluding, n - 1)))
        for (s, n), count in sorted(drawn.items())
    ]
    return third_party_rounds_epsilon(history, planned.delta), None

"""What the start of a run has cost: a small file beside an adapter or a model, written by `dpfed export` and read where
`model.adapter` or `model.weights` starts from it.

It states a bound over clients as mechanisms and steps, never who took part, so it may be published with the model.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.engine.accounts import Accounts
from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.statement import Past, Prior

SPENDING = "dpfed.json"
FORMAT = 1


@dataclass(frozen=True)
class Stored:
    """One such file, read and checked."""

    release: str
    unit: str | None
    prior: Prior
    uncounted: bool


def spending_of(release: str, accounts: Accounts | None) -> dict[str, Any]:
    """The content of the file; `accounts` is None for a run without privacy."""
    history = [] if accounts is None else accounts.realised.bound
    return {
        "format": FORMAT,
        "release": release,
        "delta": None if accounts is None else accounts.planned.delta,
        "unit": None if accounts is None else accounts.planned.unit,
        "history": [[*astuple(mechanism), steps] for mechanism, steps in history],
        "uncounted": accounts is None or accounts.planned.uncounted,
    }


def past_of(config: Config) -> Past:
    """What was spent on the adapter and on the weights that a configuration starts from."""
    prior: list[tuple[Mechanism, int]] = []
    uncounted, notes = False, []
    for folder, what in ((config.model.weights, "weights"), (config.model.adapter, "adapter")):
        if folder is None:
            continue
        path = Path(folder).expanduser() / SPENDING
        if not path.exists():
            if what == "adapter":  # weights without the file are some public model, as nearly always
                uncounted = True
                notes.append(f"{folder} has no record of what was spent on it ({SPENDING}): epsilon leaves it out")
            continue
        stored = read_stored(path)
        refuse_unfit(config, folder, stored)
        prior += stored.prior
        uncounted = uncounted or stored.uncounted
        if stored.prior:
            notes.append(f"what was spent on the {what} {folder} before is counted for every client")
        if stored.uncounted:
            notes.append(f"the {what} {folder} or what it came from was trained without privacy: epsilon leaves it out")
    return Past(tuple(prior), uncounted, tuple(notes))


def read_stored(path: Path) -> Stored:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError
        prior = tuple((Mechanism(*kind), int(steps)) for *kind, steps in stored["history"])
        private = stored["release"] != "no privacy"
        if any(steps < 1 or mechanism.noise_multiplier == 0 for mechanism, steps in prior) or private != bool(prior):
            raise ValueError
        if private and not isinstance(stored["unit"], str):
            raise ValueError
        return Stored(str(stored["release"]), stored["unit"], prior, bool(stored["uncounted"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DpfedError(f"{path} is damaged: without it nobody knows what was spent before") from None


def refuse_unfit(config: Config, folder: str, stored: Stored) -> None:
    """Costs add up only where they protect the same unit, and seeded noise stays seeded in whatever comes after."""
    unit, p = config.data.unit_column or "record", config.privacy
    protects = p.enabled and p.sigma != 0 and p.accounting != "none"
    if not stored.prior or not protects:
        return
    if stored.unit != unit:
        raise DpfedError(
            f"{folder} was trained to protect each {stored.unit}, this run protects each {unit}: their costs cannot be "
            f"added up, so begin from something else or set data.unit_column"
        )
    if stored.release.startswith("simulation") and config.run.noise == "os":
        raise DpfedError(
            f'{folder} was trained with seeded noise, which can be removed again: with run.noise = "os" begin from what was '
            "trained with it too"
        )

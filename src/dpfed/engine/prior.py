"""What an adapter has cost: a small file beside it, written by `dpfed export` and read where `model.adapter` starts from it.

It states a worst case over clients as mechanisms and steps, never who took part, so it may be published with the
adapter.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.engine.accounts import Accounts
from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.statement import Prior

SPENDING = "dpfed.json"
FORMAT = 1
NO_PRIVACY, SEEDED = "no privacy", "simulation"  # how the release notes of such runs begin


@dataclass(frozen=True)
class Before:
    """What a run starts from.

    prior   what every client may have spent on it
    note    what a person should know of it; caveat: what the run's epsilon leaves out, to be said wherever it is
    seeded  whether its noise was seeded, so that nothing that is made of it may be released
    """

    prior: Prior = ()
    note: str = ""
    caveat: str = ""
    seeded: bool = False


def spending_of(release: str, accounts: Accounts | None) -> dict[str, Any]:
    """The content of the file; `accounts` is None for a run without privacy."""
    history = [] if accounts is None else accounts.carried
    return {
        "format": FORMAT,
        "release": release,
        "delta": None if accounts is None else accounts.planned.delta,
        "unit": None if accounts is None else accounts.planned.unit,
        "history": [[*astuple(mechanism), steps] for mechanism, steps in history],
    }


def prior_of(config: Config) -> Before:
    """What was spent before on the adapter that a configuration starts from."""
    adapter = config.model.adapter
    if adapter is None:
        return Before()
    folder, path = Path(adapter), Path(adapter) / SPENDING
    if not (folder / "adapter_config.json").is_file():  # a slip in the path must not pass for a new adapter
        raise DpfedError(f"model.adapter = {adapter!r} has no adapter_config.json: give a folder written by peft")
    alone = f"epsilon speaks of this run alone, and holds only if {adapter} was not trained on these clients' records"
    if not os.path.lexists(path):
        said = f"the adapter {adapter} has no record of what was spent on it ({SPENDING}): {alone}"
        return Before(note=said, caveat=_caveat("has no record of what was spent on it"))
    release, unit, prior = _read(path)
    if release == NO_PRIVACY:
        said = f"the adapter {adapter} was trained without privacy: {alone}"
        return Before(note=said, caveat=_caveat("was trained without privacy"))
    if config.privacy.enabled and config.privacy.accounting != "none":
        _refuse_unlike(config, unit, prior)
    said = f"what was spent on the adapter {adapter} before is counted for every client"
    seeded = release.startswith(SEEDED)
    return Before(prior, said + ("; its noise was seeded, so nothing made of it may be released" * seeded), "", seeded)


def _caveat(why: str) -> str:
    return f"the adapter that training started from {why}: epsilon holds if it knew none of these clients' records"


def _read(path: Path) -> tuple[str, str | None, Prior]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        release, unit = stored["release"], stored["unit"]
        rows = [(Mechanism(*kind), steps) for *kind, steps in stored["history"]]
        whole = [n for mechanism, steps in rows for n in (mechanism.batches, mechanism.releases, steps)]
        private = release != NO_PRIVACY
        fine = (
            stored["format"] == FORMAT
            and isinstance(release, str)
            and isinstance(unit, str) == private == bool(rows)
            and all(type(n) is int and 1 <= n <= 10**9 for n in whole)
            and all(mechanism.noise_multiplier > 0 for mechanism, _ in rows)
            and len({mechanism.sampling for mechanism, _ in rows}) <= 1
        )
        if not fine:
            raise ValueError
        return release, unit, tuple(rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DpfedError(f"{path} is damaged: without it nobody knows what was spent on the adapter") from None


def _refuse_unlike(config: Config, unit: str | None, prior: Prior) -> None:
    """Costs add up only where they speak of the same neighbours."""
    mine, sampling = config.data.unit_column or "record", prior[0][0].sampling
    if unit != mine:
        raise DpfedError(
            f"the adapter {config.model.adapter} was trained with one {unit} as the protected unit and this run protects "
            f"one {mine}, so that no epsilon covers both: set data.unit_column as it was, or start from another adapter"
        )
    if sampling != config.privacy.sampling:
        raise DpfedError(
            f"the adapter {config.model.adapter} was trained with {sampling} sampling, whose cost and that of "
            f'{config.privacy.sampling} sampling do not add up: set privacy.sampling = "{sampling}"'
        )

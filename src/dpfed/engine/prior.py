"""What an adapter has cost: a small file beside it, written by `dpfed export` and read where `model.adapter` starts from it.

It states the worst case over clients as mechanisms and steps, never who took part, so it may be published with the
adapter.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from dpfed.engine.accounts import Accounts
from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.statement import Prior

SPENDING = "dpfed.json"
FORMAT = 1


def spending_of(release: str, accounts: Accounts | None) -> dict[str, Any]:
    """The content of the file; `accounts` is None for a run without privacy."""
    history = [] if accounts is None else accounts.worst
    return {
        "format": FORMAT,
        "release": release,
        "delta": None if accounts is None else accounts.planned.delta,
        "unit": None if accounts is None else accounts.planned.unit,
        "history": [[*astuple(mechanism), steps] for mechanism, steps in history],
    }


def prior_of(adapter: str | None) -> tuple[Prior, list[str]]:
    """What was spent on an adapter before, and what to say about it."""
    if adapter is None:
        return (), []
    path = Path(adapter) / SPENDING
    if not path.exists():
        return (), [
            f"{adapter} has no record of what was spent on it ({SPENDING}): epsilon speaks of this run alone, and holds "
            "only if the adapter was not trained on these clients' records"
        ]
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError
        prior = tuple((Mechanism(*kind), int(steps)) for *kind, steps in stored["history"])
        private = stored["release"] != "no privacy"
        if any(steps < 1 or mechanism.noise_multiplier == 0 for mechanism, steps in prior) or private != bool(prior):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DpfedError(f"{path} is damaged: without it nobody knows what was spent on the adapter") from None
    if not private:
        return (), [f"the adapter {adapter} was trained without privacy: epsilon speaks of this run alone"]
    return prior, [f"what was spent on the adapter {adapter} before is counted for every client"]

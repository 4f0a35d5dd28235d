"""What the start of a run has cost: a small file beside an adapter or a model, written by `dpfed export` and read where
`model.adapter` or `model.weights` starts from it.

It states a bound over clients as mechanisms and steps, never who took part, so it may be published with the model.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.engine.accounts import NO_PRIVACY, SEEDED, Accounts
from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.statement import UNCOUNTED, Past, Prior

SPENDING = "dpfed.json"
FORMAT = 1
LEAST_NOISE, MOST_NOISE = 1e-3, 1e9  # beyond, an epsilon overflows, so no run that was accounted for can have had it


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
    for given, what in ((config.model.weights, "weights"), (config.model.adapter, "adapter")):
        if given is None:
            continue
        folder = Path(given).expanduser()
        if what == "adapter" and not (folder / "adapter_config.json").is_file():  # a slip must not pass for a new one
            raise DpfedError(f"model.adapter = {given!r} has no adapter_config.json: give a folder written by peft")
        path = spending_file(folder) if folder.exists() else hub_spending(given) or spending_file(folder)
        if not os.path.lexists(path):  # a link to nothing is damage, not absence
            # Weights without the file are some public model, as nearly always; a head for these very classes need not be.
            kept = what == "weights" and getattr(config.model, "head", "new") == "kept"
            if what == "adapter" or kept:
                uncounted = True
                subject = f"the kept head of {given}" if kept else f"the adapter {given}"
                notes.append(f"{subject} has no record of what was spent on it ({SPENDING}): {UNCOUNTED}")
            continue
        stored = read_stored(path)
        refuse_unfit(config, given, stored)
        prior += stored.prior
        uncounted = uncounted or stored.uncounted
        if stored.prior:
            notes.append(f"what was spent on the {what} {given} before is counted for every client")
        if stored.uncounted:
            notes.append(f"the {what} {given} or what it came from was trained without privacy: {UNCOUNTED}")
    return Past(tuple(prior), uncounted, tuple(notes))


def served_past(config: Config) -> Past:
    """For a server's run: with all noised counts on held-out records that it will ask for. Training and held-out records are
    disjoint, but who holds which is a client's own affair: both are counted for every record, as clients' ledgers do."""
    past, section = past_of(config), config.federation
    counts = config.run.rounds // section.evaluate_every if section and section.evaluate_every else 0
    if section is None or not counts:
        return past
    asked = (Mechanism("poisson", 1.0, section.evaluate_sigma), counts)
    note = f"epsilon counts {counts} noised counts on held-out records as well (federation.evaluate_every)"
    return Past((*past.prior, asked), past.uncounted, (*past.notes, note))


def spending_file(start: Path) -> Path:
    """Where the record of a folder, or of a single file of weights, would be."""
    return (start.parent if start.is_file() else start) / SPENDING


def hub_spending(name: str) -> Path | None:
    """The record beside a model on the hub, if it has one: an export may have been published there."""
    if name == "random":
        return None
    from dpfed.model.zoo.pretrained import hub_file

    return hub_file(name, SPENDING)


def read_stored(path: Path) -> Stored:
    """The record, refused where it cannot be true: numbers of another type or range would pass for a smaller cost."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        release, unit, uncounted = stored["release"], stored["unit"], stored["uncounted"]
        rows = [(Mechanism(*kind), steps) for *kind, steps in stored["history"]]
        whole = [n for mechanism, steps in rows for n in (mechanism.batches, mechanism.releases, steps)]
        real = [(mechanism.rate, mechanism.noise_multiplier) for mechanism, _ in rows]
        private = release != NO_PRIVACY
        fine = (
            stored["format"] == FORMAT
            and isinstance(release, str)
            and isinstance(unit, str) == private == bool(rows)
            and isinstance(uncounted, bool)
            and (private or uncounted)
            and all(type(n) is int and 1 <= n <= 10**9 for n in whole)
            and all(type(x) in (int, float) for pair in real for x in pair)
            and all(LEAST_NOISE <= noise <= MOST_NOISE for _, noise in real)
            and len({mechanism.sampling for mechanism, _ in rows}) <= 1
        )
        if not fine:
            raise ValueError
        return Stored(release, unit, tuple(rows), uncounted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DpfedError(f"{path} is damaged: without it nobody knows what was spent before") from None


def refuse_unfit(config: Config, start: str, stored: Stored) -> None:
    """Costs add up only where they speak of the same neighbours, and seeded noise stays seeded in whatever comes after."""
    unit, p = config.data.unit_column or "record", config.privacy
    protects = p.enabled and p.sigma != 0 and p.accounting != "none"
    if not stored.prior or not protects:
        return
    sampling = stored.prior[0][0].sampling
    if stored.unit != unit:
        raise DpfedError(
            f"{start} was trained to protect each {stored.unit}, this run protects each {unit}, and no epsilon covers "
            "both: set data.unit_column as it was, or begin from something else"
        )
    if sampling != p.sampling:
        raise DpfedError(
            f"{start} was trained with {sampling} sampling, whose cost and that of {p.sampling} sampling do not add up: "
            f'set privacy.sampling = "{sampling}"'
        )
    if stored.release.startswith(SEEDED) and config.run.noise == "os":
        raise DpfedError(
            f'{start} was trained with seeded noise, which can be removed again: with run.noise = "os" begin from what was '
            "trained with it too"
        )

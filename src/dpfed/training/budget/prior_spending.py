"""What the start of a run has cost: the spending record of an adapter or a model.

`dpfed export` writes the record twice: into `dpfed.json` and into the metadata of each safetensors
file. A run reads it where `model.adapter` or `model.weights` starts from it. The record states a
bound over clients as mechanisms and steps, never who took part, so it may be published.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.model.zoo.pretrained import HubSilentError, hub_file, hub_metadata
from dpfed.privacy.accounting.guarantee import UNCOUNTED, Prior, PriorSpending
from dpfed.privacy.mechanism import Mechanism
from dpfed.training.budget.recorded_spending import NO_PRIVACY, SEEDED, RecordedSpending
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.embedded_record import METADATA, embed, embedded

SPENDING = "dpfed.json"
FORMAT = 1
LEAST_NOISE, MOST_NOISE = (
    1e-3,
    1e9,
)  # beyond, an epsilon overflows, so no run that was accounted for can have had it


@dataclass(frozen=True)
class Stored:
    """One record, read and checked; `text` is the record as it was written."""

    release: str
    unit: str | None
    prior: Prior
    uncounted: bool
    text: str = field(compare=False)


def spending_of(release: str, accounts: RecordedSpending | None) -> dict[str, Any]:
    """The content of the record; `accounts` is None for a run without privacy."""
    history = [] if accounts is None else accounts.realised.bound
    return {
        "format": FORMAT,
        "release": release,
        "delta": None if accounts is None else accounts.planned.delta,
        "unit": None if accounts is None else accounts.planned.unit,
        "history": [[*astuple(mechanism), steps] for mechanism, steps in history],
        "uncounted": accounts is None or accounts.planned.uncounted,
    }


def prior_spending_of(config: Config) -> PriorSpending:
    """What was spent on the adapter and on the weights that a configuration starts from."""
    prior: list[tuple[Mechanism, int]] = []
    uncounted, notes = False, []
    for given, what in ((config.model.weights, "model"), (config.model.adapter, "adapter")):
        if given is None or given == "random":
            continue
        if what == "adapter":
            _refuse_no_adapter(given)
        try:
            stored = record_of(given)
            known = True
        except HubSilentError:
            stored = None
            known = False
        if stored is None:
            subject = (
                _unrecorded(config, given, what)
                if known
                else f"the {what} {given}, as far as is known,"
            )
            if subject is not None:
                uncounted = True
                notes.append(
                    f"{subject} has no record of what was spent on it ({SPENDING}): {UNCOUNTED}"
                )
            continue
        refuse_unfit(config, given, stored)
        prior += stored.prior
        uncounted = uncounted or stored.uncounted
        if stored.prior:
            notes.append(f"what was spent on the {what} {given} before is counted for every client")
        if stored.uncounted:
            cause = "or what it came from was trained without privacy or has no record"
            notes.append(f"the {what} {given} {cause}: {UNCOUNTED}")
    return PriorSpending(tuple(prior), uncounted, tuple(notes))


def _refuse_no_adapter(given: str) -> None:
    """A typing error in the path must not pass for a new adapter."""
    if not (Path(given).expanduser() / "adapter_config.json").is_file():
        remedy = "give a folder written by peft"
        raise DpfedError(f"model.adapter = {given!r} has no adapter_config.json: {remedy}")


def _unrecorded(config: Config, given: str, what: str) -> str | None:
    """Return the subject of the warning for a start without a record; None for a public one.

    Only a name on the hub with a new head is public. A folder on this machine may hold anything,
    and a kept head is for these very classes.
    """
    if what == "model" and getattr(config.model, "head", "new") == "kept":
        return f"the kept head of {given}"
    if what == "adapter" or Path(given).expanduser().exists():
        return f"the {what} {given}"
    return None


def served_prior_spending(config: Config) -> PriorSpending:
    """For a server's run: with all noised counts on held-out records that it will ask for. Training and held-out records are
    disjoint, but who holds which is a client's own affair: both are counted for every record, as clients' ledgers do."""
    past, section = prior_spending_of(config), config.federation
    counts = (
        config.run.rounds // section.evaluate_every if section and section.evaluate_every else 0
    )
    if section is None or not counts:
        return past
    asked = (Mechanism("poisson", 1.0, section.evaluate_sigma), counts)
    note = f"epsilon counts {counts} noised counts on held-out records as well (federation.evaluate_every)"
    return PriorSpending((*past.prior, asked), past.uncounted, (*past.notes, note))


def record_of(given: str) -> Stored | None:
    """Return the record of a folder, a file of weights or a hub name; None if it has none."""
    start = Path(given).expanduser()
    found = _local_records(start) if start.exists() else _hub_records(given)
    stored = {where: checked(text, where) for where, text in found.items()}
    return _agreed(stored)


def _local_records(start: Path) -> dict[str, str]:
    path = (start.parent if start.is_file() else start) / SPENDING
    # A link to nothing is damage, not absence.
    found = {str(path): _read(path)} if os.path.lexists(path) else {}
    return found | {f"the metadata of {file}": record for file, record in embedded(start).items()}


def _hub_records(name: str) -> dict[str, str]:
    """The records of a model on the hub: an export may have been published there."""
    found: dict[str, str] = {}
    silent: HubSilentError | None = None
    try:
        path = hub_file(name, SPENDING)
        if path is not None:
            found[str(path)] = _read(path)
    except HubSilentError as error:
        silent = error
    try:
        headers = hub_metadata(name)
        records = {file: values[METADATA] for file, values in headers.items() if METADATA in values}
        found |= {f"the metadata of {file} of {name}": record for file, record in records.items()}
    except HubSilentError as error:
        silent = error
    if silent is not None and not found:
        raise silent
    return found


def _agreed(stored: Mapping[str, Stored]) -> Stored | None:
    """Return the one record; refuse records that differ.

    Which of two costs more depends on delta and on the rounds to come, so none can be chosen.
    """
    if not stored:
        return None
    (first, one), *others = stored.items()
    for second, other in others:
        if other != one:
            raise DpfedError(
                f"{first} and {second} state different spending, and nobody knows which is true: "
                "export the model again or choose another start"
            )
    return one


def write_record(folder: Path, record: str) -> None:
    """Write the record beside the weights of a folder and into them."""
    write_file(folder / SPENDING, lambda file: file.write(record.encode()))
    embed(folder, record)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise _damaged(str(path)) from None


def _damaged(where: str) -> DpfedError:
    return DpfedError(f"{where} is damaged: without it nobody knows what was spent before")


def read_stored(path: Path) -> Stored:
    """Return the record in a file, checked."""
    return checked(_read(path), str(path))


def checked(text: str, where: str) -> Stored:
    """Return the record; refuse one that cannot be true.

    Numbers of another type or range would pass for a smaller cost.
    """
    try:
        stored = json.loads(text)
        release, unit, uncounted = stored["release"], stored["unit"], stored["uncounted"]
        rows = [(Mechanism(*kind), steps) for *kind, steps in stored["history"]]
        whole = [
            n for mechanism, steps in rows for n in (mechanism.batches, mechanism.releases, steps)
        ]
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
        return Stored(release, unit, tuple(rows), uncounted, text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(where) from None


def refuse_unfit(config: Config, start: str, stored: Stored) -> None:
    """Costs add up only where they speak of the same neighbours, and seeded noise stays seeded in whatever comes after."""
    unit, p = config.data.unit_column or "record", config.privacy
    protects = p.enabled and p.sigma != 0
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


def refuse_target(config: Config, past: PriorSpending) -> None:
    """Refuse a target epsilon for a run whose start has already cost privacy."""
    if past.prior and config.privacy.target_epsilon is not None:
        raise DpfedError(
            "what the run starts from, or counts on held-out records, cost privacy too, and a "
            "target would be passed: give privacy.sigma, and privacy.budget for what no client "
            "may pass in all"
        )

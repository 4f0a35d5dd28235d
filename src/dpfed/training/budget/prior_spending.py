"""Read and write spending records: the privacy that the training of a model or adapter has cost.

`dpfed export` writes the record twice: into `dpfed.json` and into the metadata of each safetensors
file. A run that starts from `model.adapter` or `model.weights` reads the record and adds its cost.
The record states mechanisms and steps that bound the cost of every client. It does not name the
clients that took part, so it may be published.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.errors import DpfedError, phrase
from dpfed.model.zoo.hub import HubSilentError, hub_file, hub_metadata
from dpfed.privacy.accounting.guarantee import UNCOUNTED, Planned, Prior, PriorSpending
from dpfed.privacy.mechanism import Mechanism
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.embedded_record import METADATA, embed, embedded

SPENDING = "dpfed.json"
FORMAT = 1
# Smallest and largest noise multiplier in a spending record. Outside this range epsilon overflows,
# so no run with privacy can have used such noise.
LEAST_NOISE = 1e-3
MOST_NOISE = 1e9


@dataclass(frozen=True)
class SpendingRecord:
    """The privacy that the training of weights has cost, read from a file and checked.

    release    text on the protection of the training, from "release" in the run's result
    unit       name of the protected unit; None for a run without privacy
    prior      all mechanisms of the training, with the number of steps of each
    uncounted  True if a part of the training had no privacy or no record; `prior` lacks this part
    text       the record as JSON text, unchanged
    """

    release: str
    unit: str | None
    prior: Prior
    uncounted: bool
    text: str = field(compare=False)


def spending_of(release: str, realised: Planned | None) -> dict[str, Any]:
    """Return the content of a spending record (the privacy cost of a training) as JSON values.

    release   text on the protection of the training, from "release" in the run's result
    realised  the run's plan, with the number of rounds that were charged; None without privacy
    """
    history = [] if realised is None else realised.bound
    return {
        "format": FORMAT,
        "release": release,
        "delta": None if realised is None else realised.delta,
        "unit": None if realised is None else realised.unit,
        "history": [[*astuple(mechanism), steps] for mechanism, steps in history],
        "uncounted": realised is None or realised.uncounted,
    }


def prior_spending_of(config: Config) -> PriorSpending:
    """Return the privacy already spent on the weights and the adapter that a run starts from."""
    prior: list[tuple[Mechanism, int]] = []
    uncounted = False
    notes = []
    for start, part in ((config.model.weights, "model"), (config.model.adapter, "adapter")):
        if start is None or start == "random":
            continue
        record, unrecorded = _recorded_or_not(config, start, part)
        if unrecorded is not None:
            uncounted = True
            notes.append(
                f"{unrecorded} has no record of what was spent on it ({SPENDING}): {UNCOUNTED}"
            )
        if record is None:
            continue
        refuse_unfit(config, start, record)
        prior += record.prior
        if record.prior:
            notes.append(f"what was spent on the {part} {start} before is counted for every client")
        if record.uncounted:
            uncounted = True
            cause = "or what it came from was trained without privacy or has no record"
            notes.append(f"the {part} {start} {cause}: {UNCOUNTED}")
    return PriorSpending(tuple(prior), uncounted, tuple(notes))


def _recorded_or_not(
    config: Config, start: str, part: str
) -> tuple[SpendingRecord | None, str | None]:
    """Return (spending record of the weights, None), or (None, name of weights without record).

    The name is for a warning. For public weights, which need no record, return (None, None).

    start  path or hub name of the weights
    part   "model" or "adapter"
    """
    if part == "adapter" and not (Path(start).expanduser() / "adapter_config.json").is_file():
        # The folder has no adapter. Without this error, a misspelt path would begin a run with a
        # new adapter.
        remedy = "give a folder written by peft"
        raise DpfedError(f"model.adapter = {start!r} has no adapter_config.json: {remedy}")
    try:
        record = record_of(start)
    except HubSilentError:
        return None, f"the {part} {start}, as far as is known,"
    if record is not None:
        return record, None
    return None, _unrecorded(config, start, part)


def _unrecorded(config: Config, start: str, part: str) -> str | None:
    """Return a name, for a warning, of weights without a spending record; None for public weights.

    Weights count as public only if they come from the Hugging Face hub and the model's head is new.
    A folder on this machine may come from any training. A head that is kept from the weights may
    have been trained on private data.

    start  path or hub name of the weights
    part   "model" or "adapter"
    """
    if part == "model" and getattr(config.model, "head", "new") == "kept":
        return f"the kept head of {start}"
    if part == "adapter" or Path(start).expanduser().exists():
        return f"the {part} {start}"
    return None


def served_prior_spending(config: Config) -> PriorSpending:
    """Return the prior spending of a server's run, with the cost of evaluations at the clients.

    A client trains on some records and holds others out for evaluation, which releases noised
    counts. Nobody else knows which records are held out. The cost of these counts is therefore
    added for every record, as in the clients' ledgers.
    """
    past = prior_spending_of(config)
    section = config.federation
    if section is None or not section.evaluate_every:
        return past
    counts = config.run.rounds // section.evaluate_every
    if not counts:
        return past
    held_out = (Mechanism("poisson", 1.0, section.evaluate_sigma), counts)
    note = (
        f"epsilon counts {counts} noised counts on held-out records as well "
        "(federation.evaluate_every)"
    )
    return PriorSpending((*past.prior, held_out), past.uncounted, (*past.notes, note))


def record_of(start: str) -> SpendingRecord | None:
    """Return the spending record of a folder, a weights file or a hub model; None if it has none.

    Raise DpfedError if `start` has several records that differ. It is not possible to use the
    record with the larger cost, because delta and the later rounds decide which one costs more.
    """
    path = Path(start).expanduser()
    texts = _local_records(path) if path.exists() else _hub_records(start)
    records = {where: checked(text, where) for where, text in texts.items()}
    if not records:
        return None
    (first, record), *others = records.items()
    for second, other in others:
        if other != record:
            raise DpfedError(
                f"{first} and {second} state different spending, and nobody knows which is true: "
                "export the model again or choose another start"
            )
    return record


def _local_records(start: Path) -> dict[str, str]:
    path = (start.parent if start.is_file() else start) / SPENDING
    # Use `lexists`: `exists` is False for a broken link, which must count as a damaged record.
    texts = {str(path): _read(path)} if os.path.lexists(path) else {}
    return texts | {f"the metadata of {file}": record for file, record in embedded(start).items()}


def _hub_records(name: str) -> dict[str, str]:
    """Return the texts of all spending records of a hub model, by the file that contains them."""
    texts: dict[str, str] = {}
    silent: HubSilentError | None = None
    try:
        path = hub_file(name, SPENDING)
        if path is not None:
            texts[str(path)] = _read(path)
    except HubSilentError as error:
        silent = error
    try:
        for file, values in hub_metadata(name).items():
            if METADATA in values:
                texts[f"the metadata of {file} of {name}"] = values[METADATA]
    except HubSilentError as error:
        silent = error
    if silent is not None and not texts:
        raise silent
    return texts


def write_record(folder: Path, record: str) -> None:
    """Write a spending record into `dpfed.json` and into each safetensors file of a folder."""
    write_file(folder / SPENDING, lambda file: file.write(record.encode()))
    embed(folder, record)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise _damaged(str(path)) from None


def _damaged(where: str) -> DpfedError:
    return DpfedError(f"{where} is damaged: without it nobody knows what was spent before")


def checked(text: str, where: str) -> SpendingRecord:
    """Return the spending record in a JSON text after checking its values.

    Raise DpfedError for values that no run can have written.

    where  name of the text's source for the error message, such as a path
    """
    try:
        stored = json.loads(text)
        release = stored["release"]
        unit = stored["unit"]
        uncounted = stored["uncounted"]
        rows = [(Mechanism(*kind), steps) for *kind, steps in stored["history"]]
        counts = [
            n for mechanism, steps in rows for n in (mechanism.batches, mechanism.releases, steps)
        ]
        private = release != NO_PRIVACY
        rules = (
            stored["format"] == FORMAT,
            isinstance(release, str),
            isinstance(unit, str) == private == bool(rows),
            isinstance(uncounted, bool),
            private or uncounted,
            all(type(n) is int and 1 <= n <= 10**9 for n in counts),
            all(type(kind.rate) in (int, float) for kind, _ in rows),
            all(type(kind.noise_multiplier) in (int, float) for kind, _ in rows),
            all(LEAST_NOISE <= kind.noise_multiplier <= MOST_NOISE for kind, _ in rows),
            len({mechanism.sampling for mechanism, _ in rows}) <= 1,
        )
        if not all(rules):
            raise ValueError
        return SpendingRecord(release, unit, tuple(rows), uncounted, text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(where) from None


def refuse_unfit(config: Config, start: str, record: SpendingRecord) -> None:
    """Raise DpfedError if the cost in the record cannot be added to the cost of this run.

    The costs cannot be added if the protected unit or the sampling differs. A run with real noise
    must not start from weights that were trained with seeded noise: anybody with the seed can
    remove that noise.

    start   path or hub name of the weights that the run starts from
    record  spending record of these weights
    """
    unit = config.data.unit_column or "record"
    privacy = config.privacy
    if not record.prior or not privacy.enabled or privacy.sigma == 0:
        return
    sampling = record.prior[0][0].sampling
    if record.unit != unit:
        raise DpfedError(
            f"{start} was trained to protect each {record.unit}, this run protects each {unit}, "
            "and no epsilon covers both: set data.unit_column as it was, or begin from something "
            "else"
        )
    if sampling != privacy.sampling:
        raise DpfedError(
            f"{start} was trained with {sampling} sampling, whose cost and that of "
            f"{privacy.sampling} sampling do not add up: "
            f'set privacy.sampling = "{sampling}"'
        )
    if record.release.startswith(SEEDED) and config.run.noise == "os":
        raise DpfedError(
            f"{start} was trained with seeded noise, which can be removed again: "
            'with run.noise = "os" begin from what was trained with it too'
        )


def refuse_target(config: Config, past: PriorSpending) -> None:
    """Raise DpfedError for a target epsilon if the weights that the run starts from cost privacy.

    The cost of the weights and of the run together would exceed the target.
    """
    if past.prior and config.privacy.target_epsilon is not None:
        raise DpfedError(
            "the model that this run starts from has spent privacy already, or held-out records "
            "have, so the sum would exceed privacy.target_epsilon: give privacy.sigma in its "
            f"place{phrase('no target')}, and privacy.budget as the limit of the sum"
        )

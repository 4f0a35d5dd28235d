"""Notes and warnings about the data and the plan of a run, as sentences for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfed.config import Config
from dpfed.data.partition import Shards
from dpfed.data.tables import Source
from dpfed.errors import phrase
from dpfed.privacy.accounting.guarantee import delta_warning
from dpfed.privacy.plan import Plan

MAX_NAMES = 5


def data_notes(config: Config, source: Source, shards: Shards) -> list[str]:
    """Return what a user should know about how the records were read and dealt."""
    unit = config.data.unit_column
    rule = config.data.partition
    notes = [*source.notes, *unused_note(source, shards)]
    if unit is not None and rule != "natural":
        notes.append(
            f"partition = {rule} may scatter the records of one {unit} over clients: protected at each, costs add up"
        )
    if not source.declared:
        notes.append(
            f"the number of classes was read off the labels; a real federation declares {phrase('classes')}"
        )
    if rule == "natural":
        notes.append(natural_note(config, shards))
    notes += dealt_note(config)
    if not config.model.liveness:
        notes.append(
            "the liveness check is off: nothing has tested that records do not mix inside the model"
        )
    return notes


def unused_note(source: Source, shards: Shards) -> list[str]:
    unused = len(source.train) - len(shards.records)
    return (
        [
            f"{unused} of {len(source.train)} training records are not used: all clients have equal sizes"
        ]
        if unused
        else []
    )


def dealt_note(config: Config) -> list[str]:
    """What a guarantee means where a program has decided who holds a record."""
    rule = config.data.partition
    if config.run.noise != "os" or rule == "natural":
        return []
    return [
        f"clients are simulated by partition = {rule}: the guarantee speaks of each client's records as dealt"
    ]


def natural_note(config: Config, shards: Shards) -> str:
    """Return who the clients of a natural partition are, and that data.clients is not used."""
    said = (
        f"the clients are the {len(shards)} of data.client_column = {config.data.client_column!r}"
    )
    named = f"{said}: {shortened(shards.names)}" if shards.names else said
    if config.data.clients == len(shards):
        return named
    return f"{named}; {phrase('clients')} = {config.data.clients} has no effect"


def data_warnings(config: Config, source: Source, shards: Shards) -> list[str]:
    """Return a warning if undeclared classes have no training record, or if there is one class."""
    if source.declared:
        return []
    if len(source.classes) == 1:
        return [f"every record has the label {source.classes[0]!r}: there is nothing to learn"]
    counts = np.bincount(source.train.labels, minlength=len(source.classes))
    absent = [name for name, count in zip(source.classes, counts, strict=True) if not count]
    if not absent:
        return []
    return [
        f"{len(absent)} of {len(source.classes)} classes have no training record "
        f"({shortened(absent)}): number the labels without gaps, remove empty class folders, or "
        f"declare {phrase('classes')} if these classes are meant"
    ]


def plan_warnings(config: Config, plan: Plan) -> list[str]:
    """Return a warning if delta is too large for the largest client of a private plan."""
    if not plan.private:
        return []
    found = delta_warning(config.privacy.delta, int(plan.sizes.max()), plan.unit)
    return [found] if found else []


def result_warnings(result: Mapping[str, Any]) -> list[str]:
    """Return a warning if the trained model gives every test record the same answer."""
    answer = (result.get("metrics") or {}).get("one_answer")
    if answer is None:
        return []
    remedy = "try another algorithm.lr or more rounds"
    if result["epsilon"]["server_worst"] is not None:
        remedy = "try another algorithm.lr, more rounds, or a larger privacy.clip"
        if not result["release"].startswith("simulation"):
            remedy += " (each try spends epsilon again)"
    return [
        f"every test record is taken for {answer!r}, so the model does not tell classes apart; {remedy}"
    ]


def shortened(names: tuple[str, ...] | list[str]) -> str:
    """Return the first names as a list for a sentence, with dots if there are more."""
    more = ", ..." if len(names) > MAX_NAMES else ""
    # A name from a file may hold line breaks, and a note is one line.
    return ", ".join(" ".join(name.split()) for name in names[:MAX_NAMES]) + more

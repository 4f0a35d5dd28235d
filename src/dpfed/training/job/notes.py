"""Notes and warnings about a run's data and privacy plan, as sentences for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfed.config import Config
from dpfed.data.partition import Shards
from dpfed.data.tables import Source
from dpfed.errors import phrase
from dpfed.privacy.accounting.guarantee import delta_warning
from dpfed.privacy.plan import Plan
from dpfed.training.job.data import guesses_classes
from dpfed.training.job.plan import declared_sizes

MAX_NAMES = 5


def data_notes(config: Config, source: Source, shards: Shards) -> list[str]:
    """Return notes for the user about how the records were read and divided among the clients."""
    unit = config.data.unit_column
    rule = config.data.partition
    notes = list(source.notes)
    unused = len(source.train) - len(shards.records)
    if unused:
        notes.append(
            f"{unused} of {len(source.train)} training records are not used: all clients have "
            "equal sizes"
        )
    if unit is not None and rule != "natural":
        notes.append(
            f"partition = {rule} may scatter the records of one {unit} over clients: protected at "
            "each, costs add up"
        )
    if guesses_classes(config, source):
        notes.append(
            "the number of classes was read off the labels; a real federation declares "
            f"{phrase('classes')}"
        )
    if rule == "natural":
        notes.append(_natural_note(config, shards))
    if source.task != "classify" and rule.startswith("dirichlet"):
        notes.append("labels are not single classes, so clients get random records")
    notes += dealt_note(config)
    if not config.model.liveness:
        notes.append(
            "the liveness check is off: nothing has tested that records do not mix inside the model"
        )
    return notes


def dealt_note(config: Config) -> list[str]:
    """Return a note if a run with secret noise (`run.noise = "os"`) has simulated clients, else [].

    The note says that the guarantee covers records as the simulation assigns them to clients.
    """
    rule = config.data.partition
    if config.run.noise != "os" or rule == "natural":
        return []
    return [
        f"clients are simulated by partition = {rule}: the guarantee speaks of each client's "
        "records as dealt"
    ]


def _natural_note(config: Config, shards: Shards) -> str:
    """Return a sentence that names the clients, if a column of the data says who holds each record.

    It also says if the setting `data.clients` is ignored.
    """
    note = (
        f"the clients are the {len(shards)} of data.client_column = {config.data.client_column!r}"
    )
    if shards.names:
        note += f": {_shortened(shards.names)}"
    if config.data.clients != len(shards):
        note += f"; {phrase('clients')} = {config.data.clients} has no effect"
    return note


def federation_note(config: Config, plan: Plan) -> list[str]:
    """Return a note if simulated clients and the clients in [federation] differ in size, else [].

    With other sizes, the simulation trains differently from the real federation.
    """
    if config.federation is None or not config.federation.clients:
        return []
    declared = declared_sizes(config)
    if np.array_equal(declared, plan.sizes):
        return []
    return [
        f"[federation] declares {len(declared)} clients of {declared.min()} to {declared.max()} "
        f"records, this simulation deals {plan.clients} of {plan.sizes.min()} to "
        f"{plan.sizes.max()}: the two will not take the same way"
    ]


def data_warnings(config: Config, source: Source, shards: Shards) -> list[str]:
    """Return a warning if a class has no training record or if there is only one class, else [].

    If the configuration declares the classes, nothing is checked.
    """
    if source.declared or source.task != "classify":
        return []
    if len(source.classes) == 1:
        return [f"every record has the label {source.classes[0]!r}: there is nothing to learn"]
    counts = np.bincount(source.train.labels, minlength=len(source.classes))
    absent = [name for name, count in zip(source.classes, counts, strict=True) if not count]
    if not absent:
        return []
    return [
        f"{len(absent)} of {len(source.classes)} classes have no training record "
        f"({_shortened(absent)}): number the labels without gaps, remove empty class folders, or "
        f"declare {phrase('classes')} if these classes are meant"
    ]


def plan_warnings(config: Config, plan: Plan) -> list[str]:
    """Return a warning if delta is too large for the size of the largest client, else []."""
    if not plan.private:
        return []
    warning = delta_warning(config.privacy.delta, int(plan.sizes.max()), plan.unit)
    return [warning] if warning else []


def result_warnings(result: Mapping[str, Any]) -> list[str]:
    """Return a warning if the trained model predicts one class for every test record, else []."""
    answer = (result.get("metrics") or {}).get("one_answer")
    if answer is None:
        return []
    remedy = "try another algorithm.lr or more rounds"
    if result["epsilon"]["server_worst"] is not None:
        remedy = "try another algorithm.lr, more rounds, or a larger privacy.clip"
        if not result["release"].startswith("simulation"):
            remedy += " (each try spends epsilon again)"
    return [
        f"every test record is taken for {answer!r}, so the model does not tell classes apart; "
        f"{remedy}"
    ]


def _shortened(names: Sequence[str]) -> str:
    """Return the first MAX_NAMES names, joined by commas, and "..." if there are more."""
    # Names from files may contain line breaks. Replace these by spaces, so that a note stays on one
    # line.
    shown = [" ".join(name.split()) for name in names[:MAX_NAMES]]
    return ", ".join([*shown, *["..."] * (len(names) > MAX_NAMES)])

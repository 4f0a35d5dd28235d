"""Frozen features of a job: where the head alone is trained, every record goes through the rest of the model once.

They are as private as the records they are made of, so they are held in memory and never written.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpfed.config import Config
from dpfed.data.tables import Table
from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.per_sample.head_features import DROPOUT, FEATURES, HeadSplit, split
from dpfed.privacy.oracle import free, out_of_memory
from dpfed.privacy.record_batch import Records
from dpfed.training.callbacks.activity import Activity, OnActivity, ignore
from dpfed.training.job.job_cache import JobCache

NOTE = "the frozen part of the model was computed once for all records"
ON_GPU = 4096  # MiB of features on a GPU; elsewhere run.memory_limit


@dataclass(frozen=True)
class Basis:
    """What a job computes with. `given`: the inputs as they were read, where its records are features of them."""

    model: PerSample
    records: Records
    test: Records
    given: Mapping[str, Tensor] | None = None


def features_of(
    config: Config,
    model: PerSample,
    theta: Tensor,
    tables: tuple[Table, Table],
    uses: float,
    kept: JobCache,
    which: tuple[Hashable, Hashable],
    named: object,
    notes: list[str],
    on_activity: OnActivity = ignore,
) -> Basis | None:
    """The head and the features of the training and test records; None where the job takes the whole model.

    uses   how many records all steps of the run take together
    which  what distinguishes each of these tables, on this device, from others in `kept`
    named  what `which` names by its identity: kept with the features, so that no other data can come to have it
    notes  is told what was done
    on_activity  is called with the number of records whose features are done
    """
    asked = config.run.features
    if asked is False or (
        asked == "auto" and (config.model.train != "head" or uses < len(tables[0]))
    ):
        return None
    parts = _parts(config, model, theta, tables)
    if isinstance(parts, HeadSplit):
        found = _kept(parts, model, theta, tables, kept, which, named, on_activity)
        if found is not None:
            notes.append(NOTE)
            return found
        free(theta.device)
        parts = f"there is no room for the features on {theta.device}"
    if asked is True:
        raise DpfedError(
            f'run.features = true cannot be done, as {parts}: set run.features = "auto"'
        )
    if parts.startswith(
        DROPOUT
    ):  # which is often not wanted, only left on by those who saved the weights
        notes.append(f"the frozen part of the model is computed at every step, as {parts}")
    return None


def _kept(
    parts: HeadSplit,
    model: PerSample,
    theta: Tensor,
    tables: tuple[Table, Table],
    kept: JobCache,
    which: tuple[Hashable, Hashable],
    named: object,
    on_activity: OnActivity,
) -> Basis | None:
    """The basis, made once for all jobs with this model and these tables; None where the device has no room for it.

    Each table by itself: a study scores its runs on two halves of the test set, and trains on the same records.

    A shared model is one by its settings, precision and frozen weights: its identity stands for all of them. It is kept
    with its features, so that no other can come to have it.
    """
    try:
        make = partial(_made, parts, (model, named), theta, on_activity)
        (_, head, train), (_, _, test) = (
            kept.get(kind, (id(model), mark), partial(make, table))
            for kind, mark, table in zip(("features", "test features"), which, tables, strict=True)
        )
        given = {name: torch.from_numpy(x) for name, x in tables[0].inputs.items()}
        return Basis(
            head, train, test, given
        )  # the same head for all jobs on these features: they can be packed
    except Exception as error:
        if not out_of_memory(error):
            raise
    return None


def _parts(
    config: Config, model: PerSample, theta: Tensor, tables: tuple[Table, Table]
) -> HeadSplit | str:
    """The two parts of the model; or why it must stay whole. Nothing private is read for it."""
    if config.model.train != "head":
        return f'model.train = "{config.model.train}" trains more than the head'
    if config.privacy.isolation == "exact":
        return 'privacy.isolation = "exact" computes no two records in one pass'
    if config.data.augment != "none":
        return f'data.augment = "{config.data.augment}" changes a record each time it is used'
    blank = {
        name: torch.from_numpy(x[:0]).new_zeros(2, *x.shape[1:])
        for name, x in tables[0].inputs.items()
    }
    if "attention_mask" in blank:
        # Pooled features of a text without tokens are zero and would hide a difference.
        blank["attention_mask"].fill_(1)
    parts = split(model, theta, {name: x.to(theta.device) for name, x in blank.items()})
    if isinstance(parts, str):
        return parts
    on_gpu = theta.device.type == "cuda"
    needed = sum(len(table) for table in tables) * parts.size / 2**20
    if needed > (limit := ON_GPU if on_gpu else config.run.memory_limit):
        return f"the features take {needed:.0f} MiB and {'a GPU' if on_gpu else 'run.memory_limit'} gives them {limit}"
    return parts


def _made(
    parts: HeadSplit, named: object, theta: Tensor, on_activity: OnActivity, table: Table
) -> tuple[object, PerSample, Records]:
    return named, parts.head, _records(parts.frozen, theta, table, on_activity)


def _records(frozen: PerSample, theta: Tensor, table: Table, on_activity: OnActivity) -> Records:
    """The records of a table as features. They come to the device piece by piece, as the inputs are not needed again."""
    step = frozen.records_at_once(theta.device)
    found = []
    for first in range(0, max(len(table), 1), step):
        on_activity(Activity("features of records", first, len(table)))
        piece = {
            n: torch.from_numpy(x[first : first + step]).to(theta.device)
            for n, x in table.inputs.items()
        }
        found.append(frozen.scores(theta, piece))
    features = found[0] if len(found) == 1 else torch.cat(found)
    return Records({FEATURES: features}, torch.from_numpy(table.labels).to(theta.device))

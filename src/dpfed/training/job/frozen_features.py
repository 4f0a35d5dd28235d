"""Compute the output of the frozen model once per record if only the head is trained.

These outputs are the features. Features are as private as the records, so they stay in memory
and are never written to disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfed.config import Config
from dpfed.data.tables import Table
from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.per_sample.head_features import DROPOUT, FEATURES, HeadSplit, split
from dpfed.privacy.oracle import free, out_of_memory
from dpfed.privacy.record_batch import Records
from dpfed.training.callbacks.activity import Activity, OnActivity
from dpfed.training.job.data import JobTables, records_of
from dpfed.training.job.job_cache import Identity, JobCache
from dpfed.training.job.model import ReadyModel

NOTE = "the frozen part of the model was computed once for all records"
# Largest memory for features on a GPU, in MiB. On a CPU, run.memory_limit is the limit.
GPU_MEMORY_LIMIT = 4096


@dataclass(frozen=True)
class Basis:
    """The model and the records that a run computes with.

    model       the head alone, or the whole model
    records     training records for `model`: features for the head, inputs for the whole model
    test        test records in the same format
    notes       sentences to show to the user
    raw_inputs  training inputs from which the features were computed; None without features
    """

    model: PerSample
    records: Records
    test: Records
    notes: tuple[str, ...] = ()
    raw_inputs: Mapping[str, Tensor] | None = None


def basis_of(
    config: Config,
    ready: ReadyModel,
    tables: JobTables,
    draws: float,
    cache: JobCache,
    on_activity: OnActivity,
) -> Basis:
    """Return the head with the features of all records, or the whole model with the records.

    The choice depends on the setting run.features, on what is trained, and on the memory.

    draws        expected number of records that the whole run draws, with repetitions
    on_activity  called with the number of records whose features are computed so far
    """
    device = ready.theta.device
    notes: tuple[str, ...] = ()
    if _features_wanted(config, draws, len(tables.train)):
        parts = _split_model(config, ready, tables)
        if isinstance(parts, HeadSplit):
            basis = _feature_basis(parts, ready, tables, cache, on_activity)
            if basis is not None:
                return basis
            free(device)
            parts = f"there is no room for the features on {device}"
        if config.run.features is True:
            raise DpfedError(
                f'run.features = true cannot be done, as {parts}: set run.features = "auto"'
            )
        # Tell the user why no features are used, because saved models often have an unwanted
        # dropout.
        if parts.startswith(DROPOUT):
            notes = (f"the frozen part of the model is computed at every step, as {parts}",)
    records = cache.get("records", tables.train_key, lambda: records_of(tables.train, device))
    test = cache.get("test", tables.test_key, lambda: records_of(tables.test, device))
    return Basis(ready.model, records, test, notes)


def _features_wanted(config: Config, draws: float, records: int) -> bool:
    if config.run.features == "auto":
        return config.model.train == "head" and draws >= records
    return bool(config.run.features)


def _feature_basis(
    parts: HeadSplit,
    ready: ReadyModel,
    tables: JobTables,
    cache: JobCache,
    on_activity: OnActivity,
) -> Basis | None:
    """Return the head and the features of all records, or None if the device lacks memory.

    Features of training and test records have separate cache entries: the runs of a study have the
    same training records, but they may use different halves of the test set.
    """

    def make(table: Table) -> tuple[PerSample, Records]:
        # Cache the head too: runs can be trained together only if they use the same head object.
        return parts.head, _records(parts.frozen, ready.theta, table, on_activity)

    model = Identity(ready.model)
    try:
        head, train = cache.get("features", (model, tables.train_key), lambda: make(tables.train))
        _, test = cache.get("test features", (model, tables.test_key), lambda: make(tables.test))
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None
    raw_inputs = {name: torch.from_numpy(x) for name, x in tables.train.inputs.items()}
    return Basis(head, train, test, (NOTE,), raw_inputs)


def _split_model(config: Config, ready: ReadyModel, tables: JobTables) -> HeadSplit | str:
    """Return the frozen part and the head, or a text that says why the model cannot be split.

    The split is tested on inputs of zeros, so no private record is read.
    """
    if config.model.train != "head":
        return f'model.train = "{config.model.train}" trains more than the head'
    if config.privacy.isolation == "exact":
        return 'privacy.isolation = "exact" computes all records at places that they draw'
    if config.data.augment != "none":
        return f'data.augment = "{config.data.augment}" changes a record each time it is used'
    device = ready.theta.device
    blank = {
        name: torch.from_numpy(x[:0]).new_zeros(2, *x.shape[1:])
        for name, x in tables.train.inputs.items()
    }
    if "attention_mask" in blank:
        # Mark all tokens as real. If all were padding, pooled features would be zero, and a wrong
        # split would pass the test.
        blank["attention_mask"].fill_(1)
    parts = split(ready.model, ready.theta, {name: x.to(device) for name, x in blank.items()})
    if isinstance(parts, str):
        return parts
    limit = config.run.memory_limit
    owner = "run.memory_limit"
    if device.type == "cuda":
        limit = GPU_MEMORY_LIMIT
        owner = "a GPU"
    needed = (len(tables.train) + len(tables.test)) * parts.size / 2**20
    if needed > limit:
        return f"the features take {needed:.0f} MiB and {owner} gives them {limit}"
    return parts


def _records(frozen: PerSample, theta: Tensor, table: Table, on_activity: OnActivity) -> Records:
    """Return the features of a table's records.

    The inputs are copied to the device in batches, because all inputs may not fit into its memory.
    """
    step = frozen.records_at_once(theta.device)
    features = []
    for first in range(0, max(len(table), 1), step):
        on_activity(Activity("features of records", first, len(table)))
        piece = {
            name: torch.from_numpy(x[first : first + step]).to(theta.device)
            for name, x in table.inputs.items()
        }
        features.append(frozen.scores(theta, piece))
    # Use a single batch as it is, because torch.cat would copy the features.
    joined = features[0] if len(features) == 1 else torch.cat(features)
    return Records({FEATURES: joined}, torch.from_numpy(table.labels).to(theta.device))

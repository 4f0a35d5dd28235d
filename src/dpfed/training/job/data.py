"""Load the configured data, divide the records among clients, and prepare the test set of a job."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from dpfed.config import (
    Config,
    DataSection,
    LabelTask,
    ModelSection,
    refuse_idle_augmentations,
)
from dpfed.data.cache import cached, key_of
from dpfed.data.language import LANGUAGE_INPUTS
from dpfed.data.partition import Shards, partition
from dpfed.data.tables import Published, Source, Table
from dpfed.errors import DpfedError, phrase
from dpfed.model.augment import augmentation_of
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.privacy.record_batch import Augmentations, Records
from dpfed.training.job.job_cache import Identity, JobCache

NO_RECORDS = Records({}, torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True)
class JobTables:
    """Training and test records of a job (a prepared run) in CPU memory.

    train_key, test_key  keys under which `JobCache` stores the copies on the device
    """

    train: Table
    test: Table
    train_key: Hashable
    test_key: Hashable


def tables_of(config: Config, source: Source, device: torch.device) -> JobTables:
    """Return the training and test tables of a job; `run.eval_on` selects the test records."""
    key = (Identity(source), device)
    test = scored_half(source.test, config.run.eval_on)
    return JobTables(source.train, test, key, (*key, config.run.eval_on))


def load_source(config: Config, source: Source | None, cache: JobCache) -> Source:
    """Load the data source of a job, check it, and replace its texts by tokens.

    source  used instead of the source that `config.data` names; None for the configured source
    cache   has the sources of earlier jobs, which are not loaded again
    """
    task = label_task(config.model)
    if source is not None and source.task != task:
        raise DpfedError(
            f'the labels were read for model.task = "{source.task}", not "{task}": give task = '
            f'"{task}" to the call that passes the data'
        )
    raw = source or cache.get(
        "raw", (config.data, task), lambda: configured_source(config.data, config.model)
    )
    refuse_unreleasable(config, raw)
    key = (Identity(raw), config.model)
    return cache.get("source", key, lambda: tokenised(config.model, raw))


def label_task(model: ModelSection) -> LabelTask:
    """Return how labels are read for this model: "classify", "regress" or "multilabel"."""
    return model.task if model.task in ("regress", "multilabel") else "classify"


def configured_source(
    data: DataSection, model: ModelSection, part: Literal["both", "train", "test"] = "both"
) -> Source:
    """Load the data source that `data` configures, with the labels that the model learns.

    part  the tables that are used; some sources then need no file for the other table
    """
    whole: Any = data
    load = whole.load if part == "both" else getattr(data, f"load_{part}", whole.load)
    task = label_task(model)
    if task not in data.tasks:
        raise DpfedError(
            f'data.name = "{data.name}" has classes: leave out model.task = "{task}", which needs '
            "other labels"
        )
    # The `load` of most sources takes no task, because these sources have only classes as labels.
    source: Source = load() if task == "classify" else load(task)
    return source


def refuse_unreleasable(config: Config, source: Source) -> None:
    """Raise DpfedError for settings under which a release would leak more than its epsilon says.

    Most of these settings are allowed in a simulation, where `run.noise` is not "os".
    """
    data = config.data
    if data.client_column is not None and data.partition != "natural":
        raise DpfedError(
            f"data.client_column = {data.client_column!r} says who holds a record, so "
            f'data.partition must be "natural", not {data.partition!r}'
        )
    if config.run.noise != "os":
        return
    if not config.model.liveness:
        raise DpfedError(
            "model.liveness = false leaves it untested whether records mix inside the model: with "
            'run.noise = "os" set model.liveness = true'
        )
    if guesses_classes(config, source):
        raise DpfedError(
            "the number of classes was read off private labels: declare "
            f'{phrase("classes")} for run.noise = "os"'
        )
    if data.unit_column is not None and data.partition != "natural":
        raise DpfedError(
            f"data.partition = {data.partition!r} would scatter the records of one "
            f'{data.unit_column} over clients: with run.noise = "os" a protected unit needs '
            'data.partition = "natural"'
        )


def guesses_classes(config: Config, source: Source) -> bool:
    """Return True if the number of classes, a part of the model, comes from private labels."""
    if source.declared:
        return False
    is_causal = getattr(config.model, "is_causal", None)
    return is_causal is None or not is_causal(len(source.classes))


def tokenised(section: ModelSection, source: Source) -> Source:
    """Return the source with its texts replaced by tokens of the model's tokenizer.

    A source without texts is returned unchanged.
    """
    if source.train.inputs.keys().isdisjoint(LANGUAGE_INPUTS):
        return source
    coder: Any = section
    if not hasattr(section, "encode"):
        raise DpfedError(
            f"model.name = {section.name!r} does not read text: choose a language model for this "
            "data"
        )
    refuse_unclear_task(section, source)

    def encoded(part: str, raw: Table) -> Table:
        if not source.fingerprint:
            return replace(raw, inputs=coder.encode(raw.inputs, part))
        facts = {"data": source.fingerprint, "part": part, "encoding": coder.encoding}
        key = key_of("tokens", 1, options=facts)
        return replace(raw, inputs=cached(key, lambda: coder.encode(raw.inputs, part)))

    test = encoded("test", source.test)
    targets = test.inputs.get("target_mask")
    # No token precedes the first token of a record, so it is never predicted. A target there does
    # not count.
    if targets is not None and not targets[:, 1:].any():
        raise DpfedError(
            f"no test record has a target within model.max_length = {coder.max_length}: raise it, "
            "or shorten the texts before the targets"
        )
    return replace(source, train=encoded("train", source.train), test=test)


def refuse_unclear_task(section: ModelSection, source: Source) -> None:
    """Raise DpfedError if model and data do not determine whether labels or texts are learned.

    A language model with labelled data needs `model.task`. A classifier needs labels and texts.
    """
    model: Any = section
    classes = len(source.classes)
    if model.is_causal(classes):
        return
    if classes and model.causal and model.task == "auto":
        raise DpfedError(
            f"model.weights = {model.weights!r} is a language model and the data have labels: set "
            f'{phrase("task")} to "causal" to learn the texts, or to "classify" to learn the labels'
        )
    if not classes:
        raise DpfedError(
            f"model.name = {model.name!r} with these weights learns labels, and the data have "
            "none: name the column with the labels, or choose a causal language model"
        )
    if "text" not in source.train.inputs:
        raise DpfedError(
            f"a classifier reads a column of texts, and the data have "
            f"{' and '.join(source.train.inputs)}: choose a causal language model"
        )


def shards_for(config: Config, source: Source, streams: Streams) -> Shards:
    """Divide the training records among the clients; return the indices of each client's records.

    `data.partition` names the rule of the division. Its random numbers come from the run's seed.
    """
    return partition(config.data, source.train, streams.generator("partition"))


def scored_half(table: Table, which: str) -> Table:
    """Return the test records to score: all, or one half of the test set.

    which  "all"; "validation" for every second record of each class; "test" for the other half
    """
    if which == "all":
        return table
    first = np.zeros(len(table), dtype=bool)
    classes = table.class_numbers
    for label in np.unique(classes):
        first[np.flatnonzero(classes == label)[::2]] = True
    rows = first if which == "validation" else ~first
    if not rows.any():
        raise DpfedError(
            "the server's test set is too small to be halved: give it two records of a class at "
            "least"
        )
    inputs = {name: x[rows] for name, x in table.inputs.items()}
    columns = {name: column[rows] for name, column in table.columns.items()}
    return Table(inputs, table.labels[rows], columns)


def records_of(table: Table, device: torch.device) -> Records:
    """Return the records of a table as tensors on the device."""
    inputs = {name: torch.from_numpy(x).to(device) for name, x in table.inputs.items()}
    return Records(inputs, torch.from_numpy(table.labels).to(device))


def augmentations_for(config: Config, source: Source) -> Augmentations | None:
    """Return the configured augmentation of training images; None if none is configured."""
    refuse_idle_augmentations(config.data)
    augment = augmentation_of(config.data.augment)
    if augment is None:
        return None
    if source.kind != "image":
        raise DpfedError(
            f'data.augment = "{config.data.augment}" is for images, this data has {source.kind}'
        )
    return Augmentations(
        lambda inputs, keys: {name: augment(x, keys) for name, x in inputs.items()},
        config.data.views,
    )


def spec_of(source: Source, section: ModelSection) -> InputSpec:
    """Return a description of a source's inputs: kind, shape, number of classes.

    section  the [model] section, which has the length of texts in tokens, and the constants with
             which the labels of regression are standardised
    """
    name, x = next(iter(source.train.inputs.items()))
    if name in LANGUAGE_INPUTS:
        spec = _text_spec(section, len(source.classes))
    else:
        kind: Any = "text" if name == "input_ids" else source.kind
        spec = InputSpec(kind, name, tuple(x.shape[1:]), len(source.classes), source.white)
    spec = replace(spec, task=source.task)
    if source.task != "regress":
        return spec
    return standardised(spec, section, source.test.labels)


def standardised(spec: InputSpec, section: ModelSection, numbers: np.ndarray) -> InputSpec:
    """Return `spec` with the mean and the scale that standardise the labels of regression.

    They are configured in `section`, or else computed from public labels.

    numbers  labels of the public test set
    """
    center = section.target_mean
    scale = section.target_scale
    if center is None:
        center = float(numbers.mean())
    if scale is None:
        scale = float(numbers.std())
        if scale == 0:
            raise DpfedError(
                f"all numbers of the test set are {numbers[0]}: set model.target_scale to the "
                "spread of the numbers"
            )
    return replace(spec, center=center, scale=scale)


def refuse_unstated(model: ModelSection) -> None:
    """Raise DpfedError if a regression on a network does not state how to standardise labels.

    Without stated constants, server and clients would standardise labels differently.
    """
    if model.task == "regress" and (model.target_mean is None or model.target_scale is None):
        raise DpfedError(
            'model.task = "regress" on a network needs model.target_mean and model.target_scale, '
            "the same at the server and at every client"
        )


def refuse_scoring(model: ModelSection, scored: bool) -> None:
    """Raise DpfedError if clients are asked to count right answers of a regression, which has none.

    scored  True if clients count right answers on held-out records
    """
    if scored and model.task == "regress":
        raise DpfedError(
            "noised counts on held-out records are of right answers, and numbers have none: "
            "leave out federation.evaluate_every and policy.evaluate"
        )


def published_spec(published: Published, section: ModelSection) -> InputSpec:
    """Return the input description of a published data set, without reading its files."""
    if published.kind == "text":
        return _text_spec(section, published.classes)
    return InputSpec(published.kind, "pixel_values", published.shape, published.classes)


def _text_spec(section: ModelSection | None, classes: int) -> InputSpec:
    return InputSpec("text", "input_ids", (getattr(section, "max_length", 0),), classes)


def server_data(config: Config, device: torch.device) -> tuple[InputSpec, tuple[str, ...], Records]:
    """Return the input description, the class names and the public test records of a server.

    The server has no private data. Without a test set, the test records are empty.
    """
    section = config.federation
    loader: Any = config.data
    refuse_unstated(config.model)
    refuse_scoring(config.model, section is not None and section.evaluate_every > 0)
    if section is None or section.test_set:
        source = configured_source(config.data, config.model, "test")
        # The server has no training records, so use the test records in their place. An empty
        # fingerprint turns off the cache of tokens, because its entry for the training records
        # belongs to other records.
        source = tokenised(config.model, replace(source, train=source.test, fingerprint=""))
        test = records_of(scored_half(source.test, config.run.eval_on), device)
        return spec_of(source, config.model), source.classes, test
    published: Published | None = getattr(loader, "published", None)
    task = label_task(config.model)
    outputs = 1 if task == "regress" else section.classes
    if outputs is not None and section.shape:
        name = "pixel_values" if section.kind == "image" else "features"
        spec = InputSpec(section.kind, name, section.shape, outputs, section.white, task=task)
        if task == "regress":
            spec = standardised(spec, config.model, np.zeros(0))
    elif published is not None and task == "classify":
        spec = published_spec(published, config.model)
    else:
        raise DpfedError(
            "without a test set a server must be told what the clients' records are: give "
            "federation.shape and federation.classes, or federation.test_set = true"
        )
    return spec, tuple(str(c) for c in range(spec.classes)), NO_RECORDS

"""Count the records of each label at each simulated client, for the report of the operator.

The counts are private, so they are written only for simulations with seeded noise. No public page,
tracker or export reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dpfed.data.partition import Shards
from dpfed.training.job.job import Job
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.files import LABEL_COUNTS

RELEASE = "not private: counts of simulated clients' labels, for the operator only"
# Largest number of cells (clients times labels) of the table in the file. A report page cannot show
# more.
MAX_CELLS = 1_000_000


def label_counts(labels: np.ndarray, shards: Shards, classes: int) -> np.ndarray:
    """Return the number of records of each label at each client, `[clients, classes]`.

    The result has no columns for data without classes, such as texts and numbers.

    labels  class numbers `[records]`, or 0 and 1 for each class `[records, classes]`
    shards  the indices of each client's records
    """
    if labels.ndim == 1 and labels.dtype.kind == "f":
        return np.zeros((len(shards), 0), dtype=np.int64)
    own = [labels[shards.of(client)] for client in range(len(shards))]
    if labels.ndim == 2:
        return np.stack([rows.sum(0) for rows in own])
    # Cut the counts to `classes` columns. Data without classes have label 0 everywhere, which
    # `bincount` would count in a column.
    return np.stack([np.bincount(rows, minlength=classes)[:classes] for rows in own])


def write_label_counts(folder: Path, job: Job) -> None:
    """Write the number of records of each label at each simulated client to the run folder.

    Write nothing for a run with secret noise (`run.noise = "os"`), a task without classes, or a
    very large table.
    """
    classes = job.public.classes
    shards = job.private.shards
    countable = job.model.task.name == "classify" and 0 < len(shards) * len(classes) <= MAX_CELLS
    if job.config.run.noise == "os" or not countable:
        return
    counts = label_counts(job.private.records.labels.cpu().numpy(), shards, len(classes))
    table = {"release": RELEASE, "classes": list(classes), "labels": counts.tolist()}
    content = json.dumps(table).encode()
    write_file(folder / LABEL_COUNTS, lambda file: file.write(content))

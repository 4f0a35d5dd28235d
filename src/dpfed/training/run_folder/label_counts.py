"""Count the records of each label at each simulated client, for the operator's page.

The counts are private, so they are written only for simulations with seeded noise. No public page,
tracker or export reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dpfed.training.job.job import Job
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.files import LABEL_COUNTS

RELEASE = "not private: counts of simulated clients' labels, for the operator only"
# A table with more cells is not written, because no page could show it.
MAX_CELLS = 1_000_000


def label_counts(job: Job) -> np.ndarray:
    """Return the number of records of each label at each client, `[clients, classes]`."""
    shards = job.private.shards
    table = (len(shards), len(job.public.classes))
    labels = job.private.records.labels.cpu().numpy()[shards.records]
    owner = np.repeat(np.arange(len(shards)), np.diff(shards.units[shards.clients]))
    cells = np.ravel_multi_index((owner, labels), table)
    return np.bincount(cells, minlength=table[0] * table[1]).reshape(table)


def write_label_counts(folder: Path, job: Job) -> None:
    """Write the table of label counts to the run folder.

    Nothing is written with real noise, for a task without classes, or for a very large table.
    """
    cells = len(job.private.shards) * len(job.public.classes)
    countable = job.model.task.name == "classify" and 0 < cells <= MAX_CELLS
    if job.config.run.noise == "os" or not countable:
        return
    table = {
        "release": RELEASE,
        "classes": list(job.public.classes),
        "labels": label_counts(job).tolist(),
    }
    content = json.dumps(table).encode()
    write_file(folder / LABEL_COUNTS, lambda file: file.write(content))

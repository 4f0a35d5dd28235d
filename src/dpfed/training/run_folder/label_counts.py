"""Which client holds how many records of which label, for the operator's page of a simulation.

Counts of private labels without noise: they are kept only where clients are simulated with seeded noise, in a file that
says so, and no public page, tracker or export reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.private_files import open_private
from dpfed.training.job.job import Job

FILE = "holdings.json"
RELEASE = "not private: counts of simulated clients' labels, for the operator only"
MOST = 1_000_000  # cells of the table


def label_counts(job: Job) -> np.ndarray:
    """Records of each label at each client, `[clients, classes]`."""
    shards, count = job.shards, len(job.classes)
    labels = job.records.labels.cpu().numpy()[shards.records]
    owner = np.repeat(np.arange(len(shards)), np.diff(shards.units[shards.clients]))
    return np.bincount(owner * count + labels, minlength=len(shards) * count).reshape(
        len(shards), count
    )


def write_label_counts(folder: Path, job: Job) -> None:
    """Nothing is written for real noise, for tasks without classes, and for tables that nobody could look at."""
    cells = len(job.shards) * len(job.classes)
    if job.config.run.noise == "os" or not job.model.classifies or not 0 < cells <= MOST:
        return
    table = {"release": RELEASE, "classes": list(job.classes), "labels": label_counts(job).tolist()}
    try:  # nothing follows from this file, so it need not outlive a power cut
        with open_private(folder / FILE, "w") as file:
            file.write(json.dumps(table))
    except OSError as error:
        raise DpfedError(f"{folder / FILE} cannot be written: {error.strerror or error}") from None

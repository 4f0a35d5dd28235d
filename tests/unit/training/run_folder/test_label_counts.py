"""The table of label counts: right numbers, and no table for real noise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from dpfed.config import load
from dpfed.registry import registry
from dpfed.training.job.job import Job, prepare
from dpfed.training.run_folder.files import LABEL_COUNTS
from dpfed.training.run_folder.label_counts import label_counts, write_label_counts


def job_of(*keys: str) -> Job:
    return prepare(load("digits", ["model.name=linear", "data.clients=5", *keys], registry()))


def test_the_table_equals_a_loop_over_records(tmp_path: Path) -> None:
    job = job_of("data.partition=dirichlet_classwise", "data.alpha=0.3")
    by_hand = np.zeros((5, 10), dtype=int)
    for client in range(5):
        for record in job.private.shards.of(client):
            by_hand[client, int(job.private.records.labels[record])] += 1
    labels = job.private.records.labels.numpy()
    np.testing.assert_array_equal(label_counts(labels, job.private.shards, 10), by_hand)
    write_label_counts(tmp_path, job)
    kept = json.loads((tmp_path / LABEL_COUNTS).read_text())
    assert kept["labels"] == by_hand.tolist()
    assert kept["classes"] == [str(i) for i in range(10)]


def test_real_noise_writes_no_table(tmp_path: Path) -> None:
    job = job_of()
    real = dataclasses.replace(job.config, run=dataclasses.replace(job.config.run, noise="os"))
    write_label_counts(tmp_path, dataclasses.replace(job, config=real))
    assert not (tmp_path / LABEL_COUNTS).exists()

"""Validation and test halves of the public test data are disjoint, complete and stratified."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpfed.config import load
from dpfed.data.tables import Table
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.training.job.data import scored_half
from dpfed.training.job.job import prepare


def table(labels: list[int]) -> Table:
    rows = np.arange(len(labels))
    return Table({"x": rows[:, None]}, np.array(labels), {"owner": rows})


def test_records_of_each_class_alternate_between_the_halves() -> None:
    whole = table([0, 0, 1, 0, 1, 1, 0, 2])
    validation, test = scored_half(whole, "validation"), scored_half(whole, "test")
    # Class 0 has records 0, 1, 3 and 6, class 1 has 2, 4 and 5, class 2 has 7.
    assert validation.inputs["x"].ravel().tolist() == [0, 2, 3, 5, 7]
    assert test.inputs["x"].ravel().tolist() == [1, 4, 6]
    assert validation.labels.tolist() == [0, 1, 0, 1, 2]
    assert test.columns["owner"].tolist() == [1, 4, 6]
    assert scored_half(whole, "all") is whole


def test_a_test_set_too_small_for_halves_is_refused() -> None:
    with pytest.raises(DpfedError, match="too small"):
        scored_half(table([0, 1, 2]), "test")


def test_a_run_scores_the_configured_half() -> None:
    config = load("digits", ["model.name=linear", "privacy.sigma=1"], registry())
    found = {}
    for which in ("all", "validation", "test"):
        job = prepare(
            dataclasses.replace(config, run=dataclasses.replace(config.run, eval_on=which))
        )
        found[which] = job.public.test
    sizes = {which: len(records.labels) for which, records in found.items()}
    assert sizes["validation"] + sizes["test"] == sizes["all"]
    counts = {
        which: np.bincount(records.labels.numpy(), minlength=10) for which, records in found.items()
    }
    assert np.abs(counts["validation"] - counts["test"]).max() <= 1

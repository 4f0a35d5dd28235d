"""CPU threads: one for a small model, and the usual number again for a large one after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from export_case import base, images, settings

from dpfed.training.job import threads
from dpfed.training.job.job import prepare
from dpfed.training.job.threads import SMALL, set_threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_usual", [])
    yield
    torch.set_num_threads(before)


def test_a_large_model_after_a_small_one_has_the_usual_threads() -> None:
    torch.set_num_threads(3)
    seen = []
    for parameters in (SMALL, SMALL - 1, SMALL - 1, SMALL, SMALL - 1):
        set_threads("auto", parameters)
        seen.append(torch.get_num_threads())
    assert seen == [3, 1, 1, 3, 1]


def test_one_thread_that_somebody_chose_stays() -> None:
    torch.set_num_threads(1)
    set_threads("auto", SMALL)
    assert torch.get_num_threads() == 1
    set_threads(2, 1)
    assert torch.get_num_threads() == 2


def test_a_head_on_features_is_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the model is that it was taken from."""
    section = {"name": "auto-image", "weights": base("vit", tmp_path), "train": "head"}
    monkeypatch.setattr(
        threads, "SMALL", 100
    )  # the model has more parameters than that, its head has 27
    torch.set_num_threads(2)
    assert prepare(settings(section, run={"features": False}), images()).space.size == 27
    assert torch.get_num_threads() == 2
    prepare(settings(section), images())
    assert torch.get_num_threads() == 1

"""CPU threads: one for a small model, and the former number for a large one after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from export_case import base, images, settings

from dpfed.training.job import device
from dpfed.training.job.device import SMALL_MODEL, set_threads
from dpfed.training.job.job import prepare


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "_threads_before", [])
    yield
    torch.set_num_threads(before)


def test_a_large_model_after_a_small_one_has_the_usual_threads() -> None:
    torch.set_num_threads(3)
    seen = []
    for parameters in (SMALL_MODEL, SMALL_MODEL - 1, SMALL_MODEL - 1, SMALL_MODEL, SMALL_MODEL - 1):
        set_threads("auto", parameters)
        seen.append(torch.get_num_threads())
    assert seen == [3, 1, 1, 3, 1]


def test_a_thread_count_set_by_the_user_is_unchanged() -> None:
    torch.set_num_threads(1)
    set_threads("auto", SMALL_MODEL)
    assert torch.get_num_threads() == 1
    set_threads(2, 1)
    assert torch.get_num_threads() == 2


def test_a_head_on_features_is_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the whole model does not matter."""
    section = {"name": "auto-image", "weights": base("vit", tmp_path), "train": "head"}
    # The model has more parameters than this limit; its head has 27.
    monkeypatch.setattr(device, "SMALL_MODEL", 100)
    torch.set_num_threads(2)
    assert prepare(settings(section, run={"features": False}), images()).space.size == 27
    assert torch.get_num_threads() == 2
    prepare(settings(section), images())
    assert torch.get_num_threads() == 1

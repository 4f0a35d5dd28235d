"""The example scripts run, with tiny settings."""

from __future__ import annotations

import gzip
import runpy
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled_encoder_case import encoder

import dpfed
from dpfed import api
from dpfed.data.sources import mnist
from dpfed.model.zoo import text

EXAMPLES = Path(__file__).parents[3] / "examples"
QUICK: dict[str, Any] = {"run.local_steps": 1, "privacy.batch": 4.0}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dpfed.TrainedModel]:
    """Shorten every call of `fine_tune`; the list gets what it returns."""
    monkeypatch.chdir(tmp_path)
    found: list[dpfed.TrainedModel] = []

    def fine_tune(*args: Any, **given: Any) -> dpfed.TrainedModel:
        found.append(api.fine_tune(*args, **{**given, "rounds": 2, "settings": QUICK}))
        return found[-1]

    monkeypatch.setattr(dpfed, "fine_tune", fine_tune, raising=False)
    return found


def execute(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def idx(values: np.ndarray) -> bytes:
    """Return an array of bytes in the format of MNIST."""
    return gzip.compress(
        struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
    )


def test_the_cnn_without_a_folder_says_how_to_get_fashion_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The Debian package may be installed on this machine.
    monkeypatch.setattr(mnist, "DEBIAN", tmp_path / "none")
    with pytest.raises(dpfed.DpfedError, match=r"download the four files of http.*fashion-mnist"):
        execute("torch_cnn.py", monkeypatch)


def test_the_cnn_on_files_of_fashion_mnist(
    tmp_path: Path, results: list[dpfed.TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    # These files have fewer records than the published set.
    monkeypatch.setattr(mnist, "FashionMnist", partial(mnist.FashionMnist, check=False))
    execute("torch_cnn.py", monkeypatch, str(tmp_path))
    assert results[0].result["clients"] == 10
    assert results[0].result["input"]["shape"] == (1, 28, 28)


def test_one_data_set_for_each_client(
    results: list[dpfed.TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("per_client_data.py", monkeypatch)
    assert results[0].result["client_names"] == ["north", "south", "west"]
    assert results[0].classes == ("malignant", "benign")


def test_a_regression_on_diabetes(
    results: list[dpfed.TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("regression.py", monkeypatch)
    assert results[0].result["task"] == "regress"
    assert results[0].metrics["r2"] > 0


def test_several_labels_of_a_text(
    results: list[dpfed.TrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny sentence encoder stands in for MiniLM, which an extra installs."""
    folder = Path(encoder(tmp_path / "encoder"))
    monkeypatch.setattr(text, "package_folder", lambda: folder)
    monkeypatch.setitem(QUICK, "model.max_length", 8)
    execute("multilabel_text.py", monkeypatch)
    assert results[0].result["task"] == "multilabel"
    assert results[0].classes == ("food", "price", "service")
    assert results[0].result["metric"]["name"] == "macro_f1"

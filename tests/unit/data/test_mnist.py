"""IDX files under their several names, packed or not."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest

from dpfed.data.sources import mnist
from dpfed.data.sources.mnist import FashionMnist, Mnist
from dpfed.errors import DpfedError


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("dots", [True, False])
@pytest.mark.parametrize("cls", [Mnist, FashionMnist])
def test_images_and_labels(tmp_path: Path, compress: bool, dots: bool, cls: Any) -> None:
    files = makers.mnist(compress)
    if dots:
        files = {name.replace("-idx", ".idx"): data for name, data in files.items()}
    for _ in range(2):
        source = cls(path=str(makers.write(tmp_path / "m", files)), check=False).load()
        assert source.train.inputs["pixel_values"].shape == (6, 1, 28, 28)
        assert source.test.inputs["pixel_values"].shape == (4, 1, 28, 28)
        expected = np.random.default_rng(0).integers(0, 256, (6, 28, 28)).astype(np.uint8)
        assert np.array_equal(source.train.inputs["pixel_values"][:, 0], expected)
        assert source.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert len(source.classes) == 10


def test_published_counts_are_asked_for(tmp_path: Path) -> None:
    path = makers.write(tmp_path, makers.mnist())
    with pytest.raises(
        DpfedError, match=r"train-images-idx3-ubyte.gz has 6 records, the published set 60,000"
    ):
        Mnist(path=str(path)).load()


def test_missing_files_say_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "DEBIAN", tmp_path / "debian")
    with pytest.raises(DpfedError, match=r"ossci-datasets.*data.path"):
        Mnist().load()
    with pytest.raises(DpfedError, match=r"dataset-fashion-mnist.*debian.*data.path"):
        FashionMnist().load()
    with pytest.raises(DpfedError, match=r"has no train-images-idx3-ubyte.gz.*data.path"):
        FashionMnist(path=str(tmp_path)).load()
    makers.write(tmp_path / "debian", makers.mnist())
    assert len(FashionMnist(check=False).load().train) == 6
    with pytest.raises(DpfedError, match="ossci"):
        Mnist().load()


def images(n: int, side: int = 28) -> bytes:
    return makers.idx(np.zeros((n, side, side), dtype=np.uint8))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("train-images-idx3-ubyte", images(6)[:-1], "ends inside record 5 of 6"),
        ("train-images-idx3-ubyte", images(6) + b"\0", "goes on after its last record"),
        ("train-images-idx3-ubyte", images(6)[:10], "not an IDX file"),
        ("train-images-idx3-ubyte", images(0), "is empty"),
        ("train-images-idx3-ubyte", images(5), "has 5 images and .* 6 labels"),
        ("train-images-idx3-ubyte", b"", "not an IDX file"),
        ("t10k-images-idx3-ubyte", images(4, 27), "different sizes"),
        (
            "t10k-labels-idx1-ubyte",
            makers.idx(np.array([0, 1, 10, 2], dtype=np.uint8)),
            "record 2 of .* has label 10",
        ),
        (
            "t10k-labels-idx1-ubyte",
            makers.idx(np.zeros((2, 2), dtype=np.uint8)),
            "not an IDX file of bytes with 1 axes",
        ),
    ],
)
@pytest.mark.parametrize("compress", [True, False])
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, name: str, data: bytes, words: str, compress: bool
) -> None:
    change = {f"{name}.gz": gzip.compress(data)} if compress else {name: data}
    path = makers.write(tmp_path / "m", {**makers.mnist(compress), **change})
    with pytest.raises(DpfedError, match=words) as caught:
        Mnist(path=str(path), check=False).load()
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "spoil", [lambda d: d[:-4], lambda d: d[:5], lambda d: b"not gzip", lambda d: d[:-8] + bytes(8)]
)
def test_a_bad_gzip_is_one_sentence(tmp_path: Path, spoil: Any) -> None:
    files = makers.mnist()
    files["t10k-images-idx3-ubyte.gz"] = spoil(files["t10k-images-idx3-ubyte.gz"])
    with pytest.raises(DpfedError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        Mnist(path=str(makers.write(tmp_path / "m", files)), check=False).load()

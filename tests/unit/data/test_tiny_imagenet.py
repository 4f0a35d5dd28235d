"""Tiny-ImageNet from its folder and its zip."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest
from PIL import Image

from dpfed.data.sources.tiny_imagenet import TinyImagenet
from dpfed.errors import DpfedError

FILES = makers.tiny_imagenet()


def rgb(name: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB")).transpose(2, 0, 1)


@pytest.mark.parametrize("given", ["folder", "parent", "zip", "flat zip"])
def test_every_form_gives_the_same_images(tmp_path: Path, given: str) -> None:
    path = {
        "folder": lambda: makers.write(tmp_path / "tiny-imagenet-200", FILES),
        "parent": lambda: makers.write(tmp_path / "tiny-imagenet-200", FILES).parent,
        "zip": lambda: makers.zipped(tmp_path / "t.zip", FILES, "tiny-imagenet-200/"),
        "flat zip": lambda: makers.zipped(tmp_path / "t.zip", FILES),
    }[given]()
    for _ in range(2):
        source = TinyImagenet(path=str(path), check=False).load()
        assert source.classes == ("goldfish", "frog")  # sorted by WordNet id, named by words.txt
        assert source.train.labels.tolist() == [0, 0, 1, 1]
        assert source.test.labels.tolist() == [1, 0]  # as val_annotations.txt says
        names = [f"train/{w}/images/{w}_{i}.JPEG" for w in ("n01", "n02") for i in range(2)]
        assert np.array_equal(
            source.train.inputs["pixel_values"], np.stack([rgb(n) for n in names])
        )
        assert np.array_equal(source.test.inputs["pixel_values"][1], rgb("val/images/val_1.JPEG"))
    grey = source.train.inputs["pixel_values"][0]
    assert np.array_equal(grey[0], grey[2])


def test_a_changed_image_is_read_again(tmp_path: Path) -> None:
    path = makers.write(tmp_path / "t", FILES)
    before = TinyImagenet(path=str(path), check=False).load()
    (path / "val/images/val_0.JPEG").write_bytes(makers.image(64, 64, "RGB", "JPEG", 99))
    after = TinyImagenet(path=str(path), check=False).load()
    assert before.fingerprint != after.fingerprint
    assert not np.array_equal(
        before.test.inputs["pixel_values"][0], after.test.inputs["pixel_values"][0]
    )


def test_missing_files_say_where_they_are(tmp_path: Path) -> None:
    for path in (None, str(tmp_path / "nothing"), str(tmp_path)):
        with pytest.raises(
            DpfedError, match=r"cs231n.stanford.edu/tiny-imagenet-200.zip.*data.path"
        ):
            TinyImagenet(path=path).load()


ANNOTATIONS = "val/val_annotations.txt"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"train/n02/images/n02_1.JPEG": b"not an image"},
            r"n02_1.JPEG cannot be read as an image",
        ),
        (
            {"val/images/val_1.JPEG": FILES["val/images/val_1.JPEG"][:300]},
            r"val_1.JPEG cannot be read as an image",
        ),
        (
            {"train/n02/images/n02_1.JPEG": makers.image(64, 63)},
            r"n02_1.JPEG is 64x63 pixels.*n01_0.JPEG 64x64",
        ),
        (
            {f"val/images/val_{i}.JPEG": makers.image(32, 32) for i in range(2)},
            r"val_0.JPEG is 32x32 pixels",
        ),
        (
            {ANNOTATIONS: b"val_0.JPEG\tn02\t0\n"},
            r"line 1 of .*val_annotations.txt has 3 columns, not 6",
        ),
        ({ANNOTATIONS: b"val_0.JPEG\tn77\t0\t0\t63\t63\n"}, r"line 1 of .* unknown class n77"),
        ({ANNOTATIONS: b"val_7.JPEG\tn02\t0\t0\t63\t63\n"}, r"has no val/images/val_7.JPEG"),
        ({ANNOTATIONS: b""}, r"val has 0 records"),
        ({ANNOTATIONS: None}, r"has no val/val_annotations.txt"),
        ({"wnids.txt": b"n01\n"}, r"train/n02 is not a class of wnids.txt"),
        ({"wnids.txt": b"n01\nn01\n"}, r"wnids.txt names 1 classes"),
        ({"wnids.txt": b"\xff\n"}, r"line 1 of .*wnids.txt is not UTF-8"),
    ],
)
@pytest.mark.parametrize("form", ["folder", "zip"])
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, own_cache: Path, change: Any, words: str, form: str
) -> None:
    files = {name: data for name, data in {**FILES, **change}.items() if data is not None}
    path = (
        makers.write(tmp_path / "t", files)
        if form == "folder"
        else makers.zipped(tmp_path / "t.zip", files, "r/")
    )
    with pytest.raises(DpfedError, match=words):
        TinyImagenet(path=str(path), check=False).load()
    assert not own_cache.exists() or list(own_cache.iterdir()) == []


def test_published_counts_are_asked_for(tmp_path: Path) -> None:
    path = makers.write(tmp_path / "t", FILES)
    with pytest.raises(DpfedError, match="names 2 classes, not 200"):
        TinyImagenet(path=str(path)).load()


@pytest.mark.parametrize("cut", [0, 100, -10])
def test_a_truncated_zip_is_one_sentence(tmp_path: Path, cut: int) -> None:
    path = makers.zipped(tmp_path / "t.zip", FILES)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DpfedError, match=r"t\.zip"):
        TinyImagenet(path=str(path), check=False).load()

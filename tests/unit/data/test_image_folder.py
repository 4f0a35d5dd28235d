"""A user's folder of images: classes, sizes, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest
from PIL import Image

from dpfed.data.images import decode, fit
from dpfed.data.sources.image_folder import ImageFolder
from dpfed.errors import DpfedError


def load(tmp_path: Path, change: dict[str, bytes] | None = None, **section: Any) -> Any:
    makers.write(tmp_path / "i", {**makers.image_folder(), **(change or {})})
    return ImageFolder(path=str(tmp_path / "i"), **section).load()


def test_classes_are_the_folders(tmp_path: Path) -> None:
    for _ in range(2):
        source = load(tmp_path, {"test/ant/0.png": makers.image()})
        assert source.classes == (
            "ant",
            "cat",
            "dog",
        )  # sorted, also one that only the test set has
        assert not source.declared
        assert source.train.labels.tolist() == [1, 1, 2, 2]
        assert source.test.labels.tolist() == [0, 1, 1, 2, 2]
        data = (tmp_path / "i/train/dog/1.png").read_bytes()
        assert np.array_equal(
            source.train.inputs["pixel_values"][3],
            np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1),
        )


def test_declared_classes_keep_their_order(tmp_path: Path) -> None:
    source = load(tmp_path, classes=("dog", "cat", "emu"))
    assert source.declared
    assert source.classes == ("dog", "cat", "emu")
    assert source.train.labels.tolist() == [1, 1, 0, 0]
    with pytest.raises(DpfedError, match=r"cat is not one of data.classes"):
        load(tmp_path, classes=("dog", "emu"))
    with pytest.raises(DpfedError, match=r"at least two classes, each once"):
        load(tmp_path, classes=("dog", "dog"))


def test_mixed_sizes_are_refused_without_a_size_and_fitted_with_one(tmp_path: Path) -> None:
    change = {"train/dog/1.png": makers.image(9, 6), "test/cat/0.png": makers.image(5, 20)}
    with pytest.raises(
        DpfedError, match=r"train/dog/1.png is 9x6 pixels, .*train/cat/0.png 6x6.*data.size"
    ):
        load(tmp_path, change)
    assert load(tmp_path, change, size=4).train.inputs["pixel_values"].shape == (4, 3, 4, 4)
    assert load(tmp_path, change, size=11).test.inputs["pixel_values"].shape == (4, 3, 11, 11)


def test_grey(tmp_path: Path) -> None:
    assert load(tmp_path, colour="grey").train.inputs["pixel_values"].shape == (4, 1, 6, 6)
    assert load(tmp_path, {"train/cat/0.png": makers.image(mode="L")}).train.inputs[
        "pixel_values"
    ].shape == (
        4,
        3,
        6,
        6,
    )


def test_fit_keeps_the_middle() -> None:
    wide = np.zeros((4, 8), dtype=np.uint8)
    wide[:, 2:6] = 200
    assert np.asarray(fit(Image.fromarray(wide), 4)).tolist() == [[200] * 4] * 4
    assert np.asarray(fit(Image.fromarray(wide.T.copy()), 4)).tolist() == [[200] * 4] * 4
    assert fit(Image.new("L", (7, 3)), 5).size == (5, 5)
    assert fit(Image.new("L", (1000, 1)), 2).size == (2, 2)
    flat = Image.new("L", (4, 4))
    assert np.array_equal(np.asarray(fit(flat, 4)), np.asarray(flat))


def test_fit_is_bilinear() -> None:
    two = Image.fromarray(np.array([[0, 100], [0, 100]], dtype=np.uint8))
    assert np.asarray(fit(two, 4))[0].tolist() == [0, 25, 75, 100]


def test_a_photograph_is_turned_as_its_camera_says() -> None:
    turned = Image.new("L", (3, 2), 10)
    exif = turned.getexif()
    exif[0x0112] = 6
    out = io.BytesIO()
    turned.save(out, "PNG", exif=exif)
    assert decode(out.getvalue(), "x", "grey").shape == (1, 3, 2)


def deep() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((6, 6), 40_000, dtype=np.uint16)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("train/cat/0.png", b"", "0.png cannot be read as an image"),
        ("train/cat/0.png", b"text", "0.png cannot be read as an image: it is of no known format"),
        ("test/dog/1.png", makers.image()[:-30], "test/dog/1.png cannot be read as an image"),
        ("train/cat/0.png", deep(), "0.png has pixels of mode I;16, not of 8 bits"),
        ("train/cat/deeper/0.png", makers.image(), "deeper is a folder inside a class"),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, own_cache: Path, name: str, data: bytes, words: str
) -> None:
    with pytest.raises(DpfedError, match=words) as caught:
        load(tmp_path, {name: data})
    assert "\n" not in str(caught.value)
    assert not own_cache.exists() or list(own_cache.iterdir()) == []


def test_a_huge_image_is_refused_before_it_is_unpacked() -> None:
    head = makers.image(form="BMP")
    huge = head[:18] + (1 << 20).to_bytes(4, "little") + (1 << 20).to_bytes(4, "little") + head[26:]
    with pytest.raises(DpfedError, match=r"1048576x1048576 pixels|cannot be read"):
        decode(huge, "x.bmp")


def test_other_files_are_counted_and_hidden_ones_ignored(tmp_path: Path) -> None:
    source = load(
        tmp_path,
        {
            "train/cat/list.txt": b"x",
            "train/cat/.hidden": b"x",
            "train/.git/x": b"",
            "train/notes.md": b"",
        },
    )
    assert source.notes == ("left out, no image by its ending: 1 file",)
    assert len(source.train) == 4


def test_missing_folders_say_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"set data.path to a folder that holds train/CLASS"):
        ImageFolder().load()
    with pytest.raises(DpfedError, match=r"there is no folder .*train: set data.path"):
        ImageFolder(path=str(tmp_path)).load()
    makers.write(tmp_path, {"train/a/1.png": makers.image(), "test/a/1.png": makers.image()})
    with pytest.raises(DpfedError, match="shows 1 classes"):
        ImageFolder(path=str(tmp_path)).load()
    makers.write(tmp_path, {"train/b/1.png": makers.image()})
    (tmp_path / "test/a/1.png").unlink()
    with pytest.raises(DpfedError, match=r"test has no images"):
        ImageFolder(path=str(tmp_path)).load()

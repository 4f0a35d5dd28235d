"""MNIST and Fashion-MNIST: grey images of 28x28 pixels in IDX files.

MNIST: LeCun, Cortes, Burges 1998. Fashion-MNIST: Xiao, Rasul, Vollgraf 2017.

`data.path` is the folder with the four files, plain or .gz. Each must have the published number of
records. Published checksums are not compared, because Linux distributions compress the files again.
The checksum inside a .gz file is always verified.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, key_of
from dpfed.data.files import expect_count, image_source, path_of, read_bytes, reading
from dpfed.data.tables import Published, Source, expect_labels
from dpfed.errors import DpfedError

VERSION = 1
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PARTS = (("train", "train", 60_000), ("test", "t10k", 10_000))
WHAT = (
    "the folder with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two t10k files"
)


@dataclass(frozen=True)
class Mnist(DataSection):
    name: str = "mnist"
    check: Annotated[bool, "refuse files whose counts differ from the published ones"] = True

    published: ClassVar[Published] = Published(60_000, 10, "image", (1, 28, 28))
    url: ClassVar[str] = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def folder(self) -> Path:
        return path_of(self, WHAT, f"the four files of {self.url}")

    def load(self) -> Source:
        folder = self.folder()
        files = [
            find(folder, f"{stem}-{what}", self.url)
            for _, stem, _ in PARTS
            for what in ("images-idx3", "labels-idx1")
        ]
        with reading(folder):
            key = key_of(self.name, VERSION, files, {"check": self.check})
        return image_source(key, lambda: self._build(files))

    def _build(self, files: list[Path]) -> Arrays:
        out: Arrays = {"names": np.array(self.class_names)}
        for (part, _, count), images, labels in zip(PARTS, files[::2], files[1::2], strict=True):
            x = read_idx(images, 3)
            y = read_idx(labels, 1)
            if len(x) != len(y):
                raise DpfedError(
                    f"{images} has {len(x)} images and {labels} {len(y)} labels: "
                    "download both again"
                )
            if self.check:
                expect_count(len(y), count, str(images), self.url)
            expect_labels(y, len(self.class_names), str(labels))
            out[f"{part}_x"] = x[:, None]
            out[f"{part}_y"] = y.astype(np.int64)
        if out["train_x"].shape[1:] != out["test_x"].shape[1:]:
            raise DpfedError(
                f"{files[0]} and {files[2]} have images of different sizes: download both again"
            )
        return out


@dataclass(frozen=True)
class FashionMnist(Mnist):
    name: str = "fashion-mnist"

    url: ClassVar[str] = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    class_names: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )

    def folder(self) -> Path:
        if self.path is None and DEBIAN.is_dir():
            return DEBIAN
        also = f"(or install the Debian package dataset-fashion-mnist, which has them in {DEBIAN})"
        return path_of(self, WHAT, f"the four files of {self.url} {also}")


def find(folder: Path, stem: str, url: str) -> Path:
    """Return the path of one of the four data files, which may have several spellings.

    stem  the name without its ending, such as train-images-idx3
    """
    for name in (f"{stem}-ubyte", f"{stem.replace('-idx', '.idx')}-ubyte"):
        for suffix in (".gz", ""):
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    raise DpfedError(
        f"{folder} has no {stem}-ubyte.gz: download it from {url} and set data.path to its folder"
    )


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Return the array of bytes in an IDX file, the format of MNIST; `axes` is its number of axes.

    The file has two zero bytes, the type code 8, the number of axes, the length of each axis, and
    the values.
    """
    data = read_bytes(path)
    head = 4 + 4 * axes
    if len(data) < head or data[:4] != bytes((0, 0, 8, axes)):
        raise DpfedError(f"{path} is not an IDX file of bytes with {axes} axes: download it again")
    shape = struct.unpack(f">{axes}I", data[4:head])
    if 0 in shape:
        raise DpfedError(f"{path} is empty: download it again")
    record = math.prod(shape[1:])
    if len(data) - head != shape[0] * record:
        complete = (len(data) - head) // record
        what = "goes on after its last record"
        if complete < shape[0]:
            what = f"ends inside record {complete}"
        raise DpfedError(f"{path} {what} of {shape[0]:,}: download it again")
    return np.frombuffer(data, dtype=np.uint8, offset=head).reshape(shape)

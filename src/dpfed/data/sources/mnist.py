"""MNIST (LeCun, Cortes, Burges 1998) and Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): grey images of 28x28 pixels in IDX files.

`data.path` is the folder with the four files, plain or .gz. Their counts are compared with the published ones, not the
checksums of the .gz files: Linux distributions compress them anew. gzip's own checksum is verified in any case.
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
from dpfed.data.tables import Published, Source
from dpfed.errors import DpfedError

VERSION = 1
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FASHION = (
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
PARTS = (("train", "train", 60_000), ("test", "t10k", 10_000))
WHAT = (
    "the folder with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two t10k files"
)


@dataclass(frozen=True)
class Mnist(DataSection):
    name: str = "mnist"
    check: Annotated[bool, "refuse files whose counts differ from the published ones"] = True

    published: ClassVar[Published] = Published(60_000, 10, "image", (1, 28, 28))

    def load(self) -> Source:
        folder = path_of(self, WHAT, f"the four files of {MNIST_URL}")
        return load(self.name, folder, tuple("0123456789"), self.check, MNIST_URL)


@dataclass(frozen=True)
class FashionMnist(DataSection):
    name: str = "fashion-mnist"
    check: Annotated[bool, "refuse files whose counts differ from the published ones"] = True

    published: ClassVar[Published] = Published(60_000, 10, "image", (1, 28, 28))

    def load(self) -> Source:
        if self.path is None and DEBIAN.is_dir():
            folder = DEBIAN
        else:
            also = (
                f"(or install the Debian package dataset-fashion-mnist, which has them in {DEBIAN})"
            )
            folder = path_of(self, WHAT, f"the four files of {FASHION_URL} {also}")
        return load(self.name, folder, FASHION, self.check, FASHION_URL)


def load(name: str, folder: Path, names: tuple[str, ...], check: bool, url: str) -> Source:
    files = [
        find(folder, f"{stem}-{what}", url)
        for _, stem, _ in PARTS
        for what in ("images-idx3", "labels-idx1")
    ]
    with reading(folder):
        key = key_of(name, VERSION, files, {"check": check})

    def build() -> Arrays:
        out: Arrays = {"names": np.array(names)}
        for (part, _, count), images, labels in zip(PARTS, files[::2], files[1::2], strict=True):
            x, y = read_idx(images, 3), read_idx(labels, 1)
            if len(x) != len(y):
                raise DpfedError(
                    f"{images} has {len(x)} images and {labels} {len(y)} labels: download both again"
                )
            if check:
                expect_count(len(y), count, str(images), url)
            bad = np.flatnonzero(y >= len(names))
            if len(bad):
                raise DpfedError(
                    f"record {bad[0]} of {labels} has label {y[bad[0]]}; labels are 0 to {len(names) - 1}"
                )
            out[f"{part}_x"], out[f"{part}_y"] = x[:, None], y.astype(np.int64)
        if out["train_x"].shape[1:] != out["test_x"].shape[1:]:
            raise DpfedError(
                f"{files[0]} and {files[2]} have images of different sizes: download both again"
            )
        return out

    return image_source(key, build)


def find(folder: Path, stem: str, url: str) -> Path:
    """The file under any of the names that it goes by."""
    for name in (f"{stem}-ubyte", f"{stem.replace('-idx', '.idx')}-ubyte"):
        for suffix in (".gz", ""):
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    raise DpfedError(
        f"{folder} has no {stem}-ubyte.gz: download it from {url} and set data.path to its folder"
    )


def read_idx(path: Path, axes: int) -> np.ndarray:
    """An IDX file of bytes with that many axes: two zeros, the type 8, the number of axes, each length, the bytes."""
    data = read_bytes(path)
    head = 4 + 4 * axes
    if len(data) < head or data[:4] != bytes((0, 0, 8, axes)):
        raise DpfedError(f"{path} is not an IDX file of bytes with {axes} axes: download it again")
    shape = struct.unpack(f">{axes}I", data[4:head])
    if 0 in shape:
        raise DpfedError(f"{path} is empty: download it again")
    record = math.prod(shape[1:])
    if len(data) - head != shape[0] * record:
        there = (len(data) - head) // record
        what = (
            f"ends inside record {there}" if there < shape[0] else "goes on after its last record"
        )
        raise DpfedError(f"{path} {what} of {shape[0]:,}: download it again")
    return np.frombuffer(data, dtype=np.uint8, offset=head).reshape(shape)

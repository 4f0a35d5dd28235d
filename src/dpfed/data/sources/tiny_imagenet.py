"""Tiny-ImageNet-200 (Stanford CS231n 2015): 110,000 colour images of 64x64 pixels, 200 classes.

`data.path` is the folder tiny-imagenet-200, a folder that contains it, or the .zip, which is read
without being unpacked. The published test set has no labels, so the validation set is the test set
here. Classes are numbered in the order of their WordNet ids, as programs that read image folders
do. `data.check = false` also accepts fewer classes and images in the same format.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, key_of
from dpfed.data.files import (
    MOST_BYTES,
    expect_count,
    image_source,
    lines_of,
    missing,
    path_of,
    read_bytes,
    reading,
)
from dpfed.data.images import decode_all
from dpfed.data.tables import Published, Source
from dpfed.errors import DpfedError

VERSION = 1
ROOT = "tiny-imagenet-200"
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
WHAT = f"the .zip or its folder {ROOT}"
ANNOTATIONS = "val/val_annotations.txt"
SIDE = 64
CLASSES = 200
RECORDS = {"train": 100_000, "val": 10_000}


@dataclass(frozen=True)
class Files:
    """The files of the data set, in a folder or in a zip archive.

    label   path of the folder or archive, for errors
    names   paths of the files, relative to the data set's root folder
    read    returns the content of a file, given its path in `names`
    stamps  the files whose path, size and modification time form the cache key
    """

    label: str
    names: list[str]
    read: Callable[[str], bytes]
    stamps: Sequence[Path | str]

    def lines(self, name: str) -> list[str]:
        if name not in self.names:
            raise DpfedError(f"{self.label} has no {name}: download {URL} again")
        return [line for line in lines_of(self.read(name), f"{self.label}/{name}") if line.strip()]


@dataclass(frozen=True)
class TinyImagenet(DataSection):
    name: str = "tiny-imagenet"
    check: Annotated[bool, "refuse a set whose counts differ from the published ones"] = True

    published: ClassVar[Published] = Published(100_000, CLASSES, "image", (3, SIDE, SIDE))

    def load(self) -> Source:
        path = path_of(self, WHAT, URL)
        if path.is_file():
            with reading(path), zipfile.ZipFile(path) as archive:
                return self._load(of_zip(path, archive))
        folder = next((f for f in (path, path / ROOT) if (f / "wnids.txt").is_file()), None)
        if folder is None:
            raise missing(path / ROOT / "wnids.txt", WHAT, URL)
        with reading(folder):
            return self._load(of_folder(folder))

    def _load(self, files: Files) -> Source:
        key = key_of(self.name, VERSION, files.stamps, {"check": self.check, "names": files.names})
        return image_source(key, lambda: build(files, self.check))


def of_zip(path: Path, archive: zipfile.ZipFile) -> Files:
    inside = [name for name in archive.namelist() if not name.endswith("/")]
    wnids = next((name for name in inside if name.split("/")[-1] == "wnids.txt"), None)
    if wnids is None:
        raise DpfedError(f"{path} has no wnids.txt inside: download {URL} again")
    root = wnids.removesuffix("wnids.txt")

    def read(name: str) -> bytes:
        info = archive.getinfo(root + name)
        if info.file_size > MOST_BYTES:
            raise DpfedError(
                f"{path}/{root}{name} unpacks to {info.file_size:,} bytes: download {URL} again"
            )
        try:
            return archive.read(info)
        except Exception as error:
            # Catch all errors: zipfile raises different classes of errors for each method of
            # compression.
            raise DpfedError(f"{path}/{root}{name} cannot be read: {error}") from None

    names = sorted(name.removeprefix(root) for name in inside if name.startswith(root))
    return Files(f"{path}/{root}".rstrip("/"), names, read, [path])


def of_folder(folder: Path) -> Files:
    train = folder / "train"
    wnids = sorted(os.listdir(train)) if train.is_dir() else []
    parts = ("", "val/", "val/images/", *(f"train/{wnid}/images/" for wnid in wnids))
    names = sorted(
        part + name
        for part in parts
        if (folder / part).is_dir()
        for name in os.listdir(folder / part)
        if name.upper().endswith((".TXT", ".JPEG"))
    )
    stamps = [f"{folder}/{name}" for name in names]
    return Files(str(folder), names, lambda name: read_bytes(folder / name), stamps)


def build(files: Files, check: bool) -> Arrays:
    wnids = sorted(line.strip() for line in files.lines("wnids.txt"))
    if len(set(wnids)) != len(wnids) or (check and len(wnids) != CLASSES):
        raise DpfedError(
            f"{files.label}/wnids.txt names {len(set(wnids))} classes, not {CLASSES}: "
            f"download {URL} again"
        )
    numbers = {wnid: i for i, wnid in enumerate(wnids)}
    out: Arrays = {"names": np.array(class_names(files, wnids))}
    labelled = {"train": training_images(files, numbers), "val": validation_images(files, numbers)}
    for part, (where, labels) in zip(("train", "test"), labelled.items(), strict=True):
        if check or not labels:
            expect_count(len(labels), RECORDS[where], f"{files.label}/{where}", URL)
        out[f"{part}_x"] = images(files, list(labels))
        out[f"{part}_y"] = np.array(list(labels.values()), dtype=np.int64)
    return out


def images(files: Files, names: list[str]) -> np.ndarray:
    hint = f"all images are {SIDE}x{SIDE}, download {URL} again"
    labels = [f"{files.label}/{name}" for name in names]
    out = decode_all(lambda i: files.read(names[i]), labels, hint)
    if out.shape[1:] != (3, SIDE, SIDE):
        raise DpfedError(f"{labels[0]} is {out.shape[3]}x{out.shape[2]} pixels: {hint}")
    return out


def training_images(files: Files, numbers: dict[str, int]) -> dict[str, int]:
    """Return the class number of each training image, by the path of the image.

    numbers  class number by WordNet id; the id is also the name of the class's folder
    """
    labels = {}
    for name in files.names:
        if name.startswith("train/") and "/images/" in name and name.upper().endswith(".JPEG"):
            wnid = name.split("/")[1]
            if wnid not in numbers:
                raise DpfedError(
                    f"{files.label}/train/{wnid} is not a class of wnids.txt: download {URL} again"
                )
            labels[name] = numbers[wnid]
    return labels


def validation_images(files: Files, numbers: dict[str, int]) -> dict[str, int]:
    """Return the class number of each validation image, by the path of the image.

    The file val_annotations.txt lists the images and their classes.

    numbers  class number by WordNet id
    """
    labels = {}
    known = set(files.names)
    for row, line in enumerate(files.lines(ANNOTATIONS), 1):
        cells = line.split("\t")
        place = f"line {row} of {files.label}/{ANNOTATIONS}"
        if len(cells) != 6:
            raise DpfedError(f"{place} has {len(cells)} columns, not 6")
        if cells[1] not in numbers:
            raise DpfedError(f"{place} has the unknown class {cells[1]}")
        name = f"val/images/{cells[0]}"
        if name not in known:
            raise DpfedError(
                f"{files.label} has no {name}, which val_annotations.txt lists: "
                f"download {URL} again"
            )
        labels[name] = numbers[cells[1]]
    return labels


def class_names(files: Files, wnids: list[str]) -> list[str]:
    """Return the name of each class: the first name in words.txt, or else its WordNet id."""
    words = {}
    if "words.txt" in files.names:
        for line in files.lines("words.txt"):
            wnid, _, text = line.partition("\t")
            words[wnid] = text.split(",")[0].strip()
    return [words.get(wnid) or wnid for wnid in wnids]

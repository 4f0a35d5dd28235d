"""Tiny-ImageNet-200 (Stanford CS231n 2015): 100,000 and 10,000 colour images of 64x64 pixels, 200 classes.

`data.path` is the folder tiny-imagenet-200, the folder around it, or the .zip, which is read without being unpacked. The
published test set has no labels, so its validation set is the test set here. Class numbers follow the sorted WordNet
ids, as readers of image folders number them. `data.check = false` reads a sample of it in the same layout.
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
    reading,
)
from dpfed.data.images import decode_all
from dpfed.data.tables import Published, Source
from dpfed.errors import DpfedError

VERSION = 1
ROOT = "tiny-imagenet-200"
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
WHAT = f"the .zip or its folder {ROOT}"
SIDE, CLASSES, TRAIN, TEST = 64, 200, 100_000, 10_000


@dataclass(frozen=True)
class Files:
    """A folder or a zip archive: names relative to the root, and how to read one."""

    label: str
    names: list[str]
    read: Callable[[str], bytes]
    stamps: Sequence[Path | str]  # what the cache's key depends on

    def lines(self, name: str) -> list[str]:
        if name not in self.names:
            raise DpfedError(f"{self.label} has no {name}: download {URL} again")
        return [line for line in lines_of(self.read(name), f"{self.label}/{name}") if line.strip()]


@dataclass(frozen=True)
class TinyImagenet(DataSection):
    name: str = "tiny-imagenet"
    check: Annotated[bool, "refuse a set whose counts differ from the published ones"] = True

    published: ClassVar[Published] = Published(100_000, 200, "image", (3, 64, 64))

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
    at = next((name for name in inside if name.split("/")[-1] == "wnids.txt"), None)
    if at is None:
        raise DpfedError(f"{path} has no wnids.txt inside: download {URL} again")
    root = at.removesuffix("wnids.txt")

    def read(name: str) -> bytes:
        info = archive.getinfo(root + name)
        if info.file_size > MOST_BYTES:
            raise DpfedError(
                f"{path}/{root}{name} unpacks to {info.file_size:,} bytes: download {URL} again"
            )
        try:
            return archive.read(info)
        except Exception as error:  # zipfile hands on what each decompressor raises
            raise DpfedError(f"{path}/{root}{name} cannot be read: {error}") from None

    names = sorted(name.removeprefix(root) for name in inside if name.startswith(root))
    return Files(f"{path}/{root}".rstrip("/"), names, read, [path])


def of_folder(folder: Path) -> Files:
    train = folder / "train"
    wnids = sorted(f.name for f in train.iterdir()) if train.is_dir() else []
    names = []
    for part in ("", "val/", "val/images/", *(f"train/{wnid}/images/" for wnid in wnids)):
        if (folder / part).is_dir():
            names += [
                part + name
                for name in os.listdir(folder / part)
                if name.upper().endswith((".TXT", ".JPEG"))
            ]
    names.sort()

    def read(name: str) -> bytes:
        with reading(folder / name):
            return (folder / name).read_bytes()

    return Files(str(folder), names, read, [f"{folder}/{name}" for name in names])


def build(files: Files, check: bool) -> Arrays:
    wnids = sorted(line.strip() for line in files.lines("wnids.txt"))
    if len(set(wnids)) != len(wnids) or (check and len(wnids) != CLASSES):
        raise DpfedError(
            f"{files.label}/wnids.txt names {len(set(wnids))} classes, not {CLASSES}: download {URL} again"
        )
    number = {wnid: i for i, wnid in enumerate(wnids)}
    train = [
        n
        for n in files.names
        if n.startswith("train/") and "/images/" in n and n.upper().endswith(".JPEG")
    ]
    train_labels = []
    for name in train:
        wnid = name.split("/")[1]
        if wnid not in number:
            raise DpfedError(
                f"{files.label}/train/{wnid} is not a class of wnids.txt: download {URL} again"
            )
        train_labels.append(number[wnid])
    test, test_labels = annotated(files, number)
    out: Arrays = {"names": np.array(spoken(files, wnids))}
    for part, where, names, labels, count in (
        ("train", "train", train, train_labels, TRAIN),
        ("test", "val", test, test_labels, TEST),
    ):
        if check or not names:
            expect_count(len(names), count, f"{files.label}/{where}", URL)
        out[f"{part}_x"] = images(files, names)
        out[f"{part}_y"] = np.array(labels, dtype=np.int64)
    return out


def images(files: Files, names: list[str]) -> np.ndarray:
    hint = f"all images are {SIDE}x{SIDE}, download {URL} again"
    out = decode_all(
        lambda i: files.read(names[i]), [f"{files.label}/{name}" for name in names], hint
    )
    if out.shape[1:] != (3, SIDE, SIDE):
        raise DpfedError(
            f"{files.label}/{names[0]} is {out.shape[3]}x{out.shape[2]} pixels: {hint}"
        )
    return out


def annotated(files: Files, number: dict[str, int]) -> tuple[list[str], list[int]]:
    """The validation images with the labels that val_annotations.txt gives them."""
    names, labels, there = [], [], set(files.names)
    for row, line in enumerate(files.lines("val/val_annotations.txt"), 1):
        cells = line.split("\t")
        if len(cells) != 6:
            raise DpfedError(
                f"line {row} of {files.label}/val/val_annotations.txt has {len(cells)} columns, not 6"
            )
        if cells[1] not in number:
            raise DpfedError(
                f"line {row} of {files.label}/val/val_annotations.txt has the unknown class {cells[1]}"
            )
        name = f"val/images/{cells[0]}"
        if name not in there:
            raise DpfedError(
                f"{files.label} has no {name}, which val_annotations.txt lists: download {URL} again"
            )
        names.append(name)
        labels.append(number[cells[1]])
    return names, labels


def spoken(files: Files, wnids: list[str]) -> list[str]:
    """The first word for each class, where words.txt has it."""
    words = {}
    if "words.txt" in files.names:
        for line in files.lines("words.txt"):
            wnid, _, text = line.partition("\t")
            words[wnid] = text.split(",")[0].strip()
    return [words.get(wnid) or wnid for wnid in wnids]

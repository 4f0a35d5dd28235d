"""A user's own images, one folder for each class: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .webp, ...).

All images must be of one size; with `data.size` the shorter side is resized to it and the middle cut out. The classes are
the folders' names, sorted. Folder names are read off private data: `data.classes` declares them instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, key_of
from dpfed.data.files import image_source, reading
from dpfed.data.images import Colour, decode_all
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.text import counted

VERSION = 1
ENDINGS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
)
SHAPE = "a folder that holds train/CLASS/*.png and test/CLASS/*.png"


@dataclass(frozen=True)
class ImageFolder(DataSection):
    name: str = "image-folder"
    size: Annotated[
        int | None, Ge(1), Le(4096), "resize the shorter side to this and cut out the middle"
    ] = None
    colour: Annotated[Colour, "three channels or one"] = "rgb"
    classes: Annotated[
        tuple[str, ...] | None, "names of the class folders; default: those that are there"
    ] = None

    def load(self) -> Source:
        if self.path is None:
            raise DpfedError(f'data.name = "image-folder" reads files: set data.path to {SHAPE}')
        root = Path(self.path).expanduser()
        with reading(root):
            found = {part: class_folders(root, part) for part in ("train", "test")}
            names = self._names(found)
            files, labels, others = {}, {}, 0
            for part, folders in found.items():
                files[part], labels[part], odd = images_in(folders, names)
                others += odd
                if not files[part]:
                    raise DpfedError(f"{root / part} has no images: data.path must be {SHAPE}")
            options = {"size": self.size, "colour": self.colour, "names": names}
            key = key_of(self.name, VERSION, [*files["train"], *files["test"]], options)
        note = (f"left out, no image by its ending: {counted(others, 'file')}",) if others else ()
        return image_source(
            key, lambda: self._build(files, labels, names), self.classes is not None, note
        )

    def _names(self, found: dict[str, list[Path]]) -> list[str]:
        there = sorted({folder.name for folders in found.values() for folder in folders})
        if self.classes is None:
            if len(there) < 2:
                raise DpfedError(
                    f"{self.path} shows {len(there)} classes: data.path must be {SHAPE}, with two classes or more"
                )
            return there
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise DpfedError(
                f"data.classes = {list(self.classes)} must name at least two classes, each once"
            )
        for part, folders in found.items():
            for folder in folders:
                if folder.name not in self.classes:
                    raise DpfedError(
                        f"{self.path}/{part}/{folder.name} is not one of data.classes: add or move it"
                    )
        return list(self.classes)

    def _build(
        self, files: dict[str, list[Path]], labels: dict[str, list[int]], names: list[str]
    ) -> Arrays:
        everything = [*files["train"], *files["test"]]

        def read(i: int) -> bytes:
            with reading(everything[i]):
                return everything[i].read_bytes()

        hint = (
            "set data.size to bring all images to one size"
            if self.size is None
            else "choose a smaller data.size"
        )
        pixels = decode_all(read, [str(f) for f in everything], hint, self.colour, self.size)
        cut = len(files["train"])
        return {
            "train_x": pixels[:cut],
            "test_x": pixels[cut:],
            "train_y": np.array(labels["train"], dtype=np.int64),
            "test_y": np.array(labels["test"], dtype=np.int64),
            "names": np.array(names),
        }


def class_folders(root: Path, part: str) -> list[Path]:
    folder = root / part
    if not folder.is_dir():
        raise DpfedError(f"there is no folder {folder}: set data.path to {SHAPE}")
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def images_in(folders: list[Path], names: list[str]) -> tuple[list[Path], list[int], int]:
    """The image files with their classes, in the order of their names, and how many other files there are."""
    files, labels, others = [], [], 0
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.name.startswith("."):
                continue
            if file.is_dir():
                raise DpfedError(
                    f"{file} is a folder inside a class: put its images directly into {folder}"
                )
            if file.suffix.lower() not in ENDINGS:
                others += 1
                continue
            files.append(file)
            labels.append(names.index(folder.name))
    return files, labels, others

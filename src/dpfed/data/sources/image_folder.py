"""A user's own images, one folder for each class: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png.

Without `data.size`, all images must have the same size. With `data.size`, each image becomes a
square of this size: it is resized, and both ends of the longer side are cut off.

The classes are the sorted folder names. These names come from private data and are not protected.
Set `data.classes` to declare the classes publicly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, key_of
from dpfed.data.files import image_source, read_bytes, reading
from dpfed.data.images import Colour, decode_all
from dpfed.data.labels import numbers_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError, counted

VERSION = 1
ENDINGS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
)
SHAPE = "a folder that holds train/CLASS/*.png and test/CLASS/*.png"


@dataclass(frozen=True)
class ImageFolder(DataSection):
    name: str = "image-folder"
    size: Annotated[
        int | None, Ge(1), Le(4096), "resize the shorter side to this and crop the middle"
    ] = None
    colour: Annotated[Colour, "three channels or one"] = "rgb"
    classes: Annotated[
        tuple[str, ...] | None, "names of the class folders; default: all that exist"
    ] = None

    def load(self) -> Source:
        if self.path is None:
            raise DpfedError(f'data.name = "image-folder" reads files: set data.path to {SHAPE}')
        root = Path(self.path).expanduser()
        with reading(root):
            folders = {part: class_folders(root, part) for part in ("train", "test")}
            names = self._names(folders)
            found = {part: images_in(folders[part], names) for part in folders}
            for part, images in found.items():
                if not images.files:
                    raise DpfedError(f"{root / part} has no images: data.path must be {SHAPE}")
            options = {"size": self.size, "colour": self.colour, "names": names}
            files = [*found["train"].files, *found["test"].files]
            key = key_of(self.name, VERSION, files, options)
        others = sum(images.others for images in found.values())
        note = (f"left out, no image by its ending: {counted(others, 'file')}",) if others else ()
        declared = self.classes is not None
        return image_source(key, lambda: self._build(found, names), declared, note)

    def _names(self, found: dict[str, list[Path]]) -> list[str]:
        """Return the class names: `data.classes`, or the sorted folder names if it is not set."""
        if self.classes is None:
            shown = sorted({folder.name for folders in found.values() for folder in folders})
            if len(shown) < 2:
                raise DpfedError(
                    f"{self.path} shows {len(shown)} classes: data.path must be {SHAPE}, with two "
                    "classes or more"
                )
            return shown
        known = numbers_of(self.classes, "data.classes")
        for part, folders in found.items():
            for folder in folders:
                if folder.name not in known:
                    raise DpfedError(
                        f"{self.path}/{part}/{folder.name} is not one of data.classes: "
                        "add or move it"
                    )
        return list(self.classes)

    def _build(self, found: dict[str, Images], names: list[str]) -> Arrays:
        train, test = found["train"], found["test"]
        files = [*train.files, *test.files]
        hint = "choose a smaller data.size"
        if self.size is None:
            hint = "set data.size to bring all images to one size"
        pixels = decode_all(
            lambda i: read_bytes(files[i]), list(map(str, files)), hint, self.colour, self.size
        )
        return {
            "train_x": pixels[: len(train.files)],
            "test_x": pixels[len(train.files) :],
            "train_y": np.array(train.labels, dtype=np.int64),
            "test_y": np.array(test.labels, dtype=np.int64),
            "names": np.array(names),
        }


def class_folders(root: Path, part: str) -> list[Path]:
    folder = root / part
    if not folder.is_dir():
        raise DpfedError(f"there is no folder {folder}: set data.path to {SHAPE}")
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


class Images(NamedTuple):
    """The image files of all class folders, with their class numbers.

    others  number of files in these folders that are not images
    """

    files: list[Path]
    labels: list[int]
    others: int


def images_in(folders: list[Path], names: list[str]) -> Images:
    """Return the image files in class folders, sorted by folder and file name.

    The class number of an image is the position of its folder's name in `names`.
    """
    files = []
    labels = []
    others = 0
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.name.startswith("."):
                continue
            if file.is_dir():
                raise DpfedError(
                    f"{file} is a folder inside a class: put its images directly into {folder}"
                )
            if file.suffix.lower() in ENDINGS:
                files.append(file)
                labels.append(names.index(folder.name))
            else:
                others += 1
    return Images(files, labels, others)

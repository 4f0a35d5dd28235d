"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 60,000 colour images of 32x32 pixels.

`data.path` is a published archive (binary or Python version), its unpacked folder, or a folder that
contains one of these. An archive is read without being unpacked to disk.

Archives and pickles must have the published checksums. All files must have the published number of
records. `data.check = false` turns both checks off, so that other files in the same format can be
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, key_of
from dpfed.data.files import (
    check_md5,
    expect_count,
    image_source,
    lines_of,
    missing,
    path_of,
    read_bytes,
    reading,
    tar_members,
)
from dpfed.data.pickles import RefusedError, loads
from dpfed.data.tables import Published, Source, expect_labels
from dpfed.errors import DpfedError

URL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32
VERSION = 1

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
COARSE = """aquatic_mammals fish flowers food_containers fruit_and_vegetables
household_electrical_devices household_furniture insects large_carnivores
large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2"""
FINE = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
tulip turtle wardrobe whale willow_tree wolf woman worm"""


@dataclass(frozen=True)
class Layout:
    """File names and format of one published version (binary or Python) of a data set.

    folder       name of the folder that the archive contains
    archive      file name of the archive
    md5          checksum of the archive
    train, test  names of the files with the records
    names        file with the names of the classes
    labels       key of the labels in a pickle; for binary records, position of the label byte
    names_key    key of the class names in a pickle; "" for a text file with one name per line
    head         number of label bytes before the pixels of a binary record; 0 for pickles
    pickle_md5   checksums of the record files, then of the file `names`; empty for binary files
    """

    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    labels: str | int
    names_key: str = ""
    head: int = 0
    pickle_md5: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test)

    @property
    def url(self) -> str:
        return URL + self.archive


def cifar10_layouts() -> tuple[Layout, ...]:
    batches = tuple(f"data_batch_{i}" for i in range(1, 6))
    return (
        Layout(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            tuple(f"{b}.bin" for b in batches),
            ("test_batch.bin",),
            "batches.meta.txt",
            labels=0,
            head=1,
        ),
        Layout(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            batches,
            ("test_batch",),
            "batches.meta",
            labels="labels",
            names_key="label_names",
            pickle_md5=(
                "c99cafc152244af753f735de768cd75f",
                "d4bba439e000b95fd0a9bffe97cbabec",
                "54ebc095f3ab1f0389bbae665268c751",
                "634d18415352ddfa80567beed471001a",
                "482c414d41f54cd18b22e5b47cb7c3cb",
                "40351d587109b95175f43aff81a1287e",
                "5ff9c542aee3614f3951f8cda6e48888",
            ),
        ),
    )


def cifar100_layouts(label: str) -> tuple[Layout, ...]:
    return (
        Layout(
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            ("train.bin",),
            ("test.bin",),
            f"{label}_label_names.txt",
            labels=("coarse", "fine").index(label),
            head=2,
        ),
        Layout(
            "cifar-100-python",
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            ("train",),
            ("test",),
            "meta",
            labels=f"{label}_labels",
            names_key=f"{label}_label_names",
            pickle_md5=(
                "16019d7e3df5f24257cddd939b257f8d",
                "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "7973b15100ade9c7d40fb424638fde48",
            ),
        ),
    )


@dataclass(frozen=True)
class Cifar10(DataSection):
    name: str = "cifar10"
    check: Annotated[
        bool, "refuse files that differ from the published ones in checksum or count"
    ] = True

    published: ClassVar[Published] = Published(50_000, 10, "image", (3, 32, 32))

    def load(self) -> Source:
        return load(self, cifar10_layouts(), CIFAR10.split(), self.check)


@dataclass(frozen=True)
class Cifar100(DataSection):
    name: str = "cifar100"
    label: Annotated[Literal["fine", "coarse"], "100 fine classes or 20 coarse ones"] = "fine"
    check: Annotated[
        bool, "refuse files that differ from the published ones in checksum or count"
    ] = True

    @property
    def class_names(self) -> list[str]:
        return (FINE if self.label == "fine" else COARSE).split()

    @property
    def published(self) -> Published:
        return Published(50_000, len(self.class_names), "image", (3, 32, 32))

    def load(self) -> Source:
        return load(self, cifar100_layouts(self.label), self.class_names, self.check)


def load(
    section: DataSection, layouts: tuple[Layout, ...], official: list[str], check: bool
) -> Source:
    url = " or ".join(layout.url for layout in layouts)
    what = f"the archive or its folder {layouts[0].folder}"
    path = path_of(section, what, url)
    found = locate(path, layouts)
    if found is None:
        raise missing(path / layouts[0].folder if path.is_dir() else path, what, url)
    layout, files = found
    options = {"check": check, "label": getattr(section, "label", None)}
    with reading(path):
        key = key_of(section.name, VERSION, files, options)

    def build() -> Arrays:
        if layout is None:
            return arrays_of(
                *from_archive(files[0], layouts, check), str(files[0]), official, check
            )
        content = {file.name: read_bytes(file) for file in files}
        folder = files[0].parent
        if check:
            for name, md5 in zip((*layout.files, layout.names), layout.pickle_md5, strict=False):
                if name in content:
                    check_md5(folder / name, md5, layout.url)
        return arrays_of(layout, content, str(folder), official, check)

    return image_source(key, build)


def locate(path: Path, layouts: tuple[Layout, ...]) -> tuple[Layout | None, list[Path]] | None:
    """Return the layout of the data set at `path` (its file names and format), and its files.

    Return None if no data are found. For an archive the returned layout is None, because only
    `from_archive` finds out the layout.
    """
    if path.is_file():
        return None, [path]
    for layout in layouts:
        for folder in (path, path / layout.folder):
            found = [name for name in layout.files if (folder / name).is_file()]
            if found and len(found) < len(layout.files):
                absent = next(name for name in layout.files if name not in found)
                raise DpfedError(
                    f"{folder} has no {absent}: unpack {layout.archive} from {URL} again"
                )
            if found:
                files = [folder / name for name in (*layout.files, layout.names)]
                return layout, [file for file in files if file.is_file()]
    for layout in layouts:
        if (path / layout.archive).is_file():
            return None, [path / layout.archive]
    return None


def from_archive(
    path: Path, layouts: tuple[Layout, ...], check: bool
) -> tuple[Layout, dict[str, bytes]]:
    """Return the layout (file names and format) of an archive, and its files' contents by name.

    check  True to require the published checksum of the archive
    """
    content = tar_members(path, {name for one in layouts for name in (*one.files, one.names)})
    nearest = max(layouts, key=lambda one: sum(name in content for name in one.files))
    absent = next((name for name in nearest.files if name not in content), None)
    if absent is not None:
        raise DpfedError(
            f"{path} has no {absent} inside: download {nearest.archive} again from {nearest.url}"
        )
    if check:
        check_md5(path, nearest.md5, nearest.url)
    return nearest, content


def arrays_of(
    layout: Layout, content: dict[str, bytes], where: str, official: list[str], check: bool
) -> Arrays:
    """Return the images, labels and class names of a data set as arrays.

    content   contents of the files by name
    where     the folder or archive, for errors
    official  published names of the classes
    check     True to require the published number of records
    """
    out: Arrays = {}
    for part, members, count in (("train", layout.train, 50_000), ("test", layout.test, 10_000)):
        read = [batch(content[m], layout, f"{where}/{m}", len(official)) for m in members]
        if check:
            for member, (_, labels) in zip(members, read, strict=True):
                expect_count(len(labels), count // len(members), f"{where}/{member}", layout.url)
        out[f"{part}_x"] = np.concatenate([x for x, _ in read])
        out[f"{part}_y"] = np.concatenate([y for _, y in read])
    label = f"{where}/{layout.names}"
    out["names"] = np.array(class_names(content.get(layout.names), layout, label, official))
    return out


def batch(data: bytes, layout: Layout, label: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [n, 3, 32, 32], and the labels [n] of one record file.

    data     content of the file
    label    name of the file in errors
    classes  number of classes; a label must be smaller
    """
    if layout.head:
        length = layout.head + PIXELS
        if len(data) % length or not data:
            raise DpfedError(
                f"{label} ends inside record {len(data) // length} (a record has {length} bytes): "
                "download it again"
            )
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
        labels = records[:, int(layout.labels)].astype(np.int64)
        images = records[:, layout.head :]
    else:
        images, labels = pickled(data, str(layout.labels), label)
    expect_labels(labels, classes, label, remedy=": download it again")
    return images.reshape(-1, 3, 32, 32), labels


def pickled(data: bytes, key: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [n, 3072] and the labels [n] of one record file of the Python version.

    data   content of the file, a pickle
    key    key of the labels in the pickle
    label  name of the file in errors
    """
    content = unpickle(data, label)
    images = np.asarray(content.get("data"))
    labels = content.get(key)
    if images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
        raise DpfedError(f"{label} has no images of {PIXELS} bytes under 'data': download it again")
    if (
        not isinstance(labels, list)
        or not labels
        or not all(type(y) is int and 0 <= y < 256 for y in labels)
    ):
        raise DpfedError(f"{label} has no list of labels under {key!r}: download it again")
    if len(labels) != len(images):
        raise DpfedError(
            f"{label} has {len(images)} images and {len(labels)} labels: download it again"
        )
    return images, np.array(labels, dtype=np.int64)


def unpickle(data: bytes, label: str) -> dict[str, Any]:
    try:
        content = loads(data)
    except RefusedError as error:
        raise DpfedError(f"{label} is not a pickle of arrays and lists: {error}") from None
    if not isinstance(content, dict):
        raise DpfedError(f"{label} is not a pickle of named arrays: download it again")
    return {text_of(key): value for key, value in content.items()}


def text_of(value: Any) -> str:
    """Return a name from a pickle as a string. Python 2 wrote names as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def class_names(data: bytes | None, layout: Layout, label: str, official: list[str]) -> list[str]:
    """Return the class names in the content `data` of a file.

    If the file does not exist, so that `data` is None, return `official`, the published names.
    """
    if data is None:
        return official
    if layout.head:
        names: Any = [line.strip() for line in lines_of(data, label) if line.strip()]
    else:
        names = unpickle(data, label).get(layout.names_key)
    if (
        not isinstance(names, list)
        or len(names) != len(official)
        or not all(isinstance(name, str | bytes) for name in names)
    ):
        raise DpfedError(
            f"{label} does not name {len(official)} classes: download it again or delete it"
        )
    return [text_of(name) for name in names]

"""GLUE (Wang et al. 2019): SST-2, QQP, QNLI, MNLI and RTE from the TSV files that the benchmark publishes.

`data.path` is a task's folder (train.tsv, dev.tsv) or the folder around it (SST-2, QQP, QNLI, MNLI, RTE). The published
test sets have no labels, so the development set is the test set here; for MNLI it is dev_matched.tsv.

The files have no quoting: a quotation mark is a character like any other, and only a tab parts columns. Columns are found
by the names in the first line. A row with another number of columns is refused, with one exception: the published QQP
has a few questions with a line break inside, and such broken rows are left out, with a note that counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, cached, key_of, pack_text, unpack_text
from dpfed.data.files import expect_count, lines_of, path_of, read_bytes, reading
from dpfed.data.tables import Published, Source, Table
from dpfed.errors import DpfedError

VERSION = 1
URL = "https://dl.fbaipublicfiles.com/glue/data/"


@dataclass(frozen=True)
class Task:
    folder: str
    archive: str
    texts: tuple[str, ...]  # columns of the sentence, or of the two
    label: str
    classes: tuple[str, ...]
    train: tuple[int, ...]  # published counts; QQP's depends on how its broken rows are read
    test: tuple[int, ...]
    numbers: bool = False  # the files have 0 and 1, not the names
    dev: str = "dev.tsv"
    broken_rows: bool = False

    @property
    def url(self) -> str:
        return URL + self.archive


TWO = ("entailment", "not_entailment")
SST2 = Task(
    "SST-2",
    "SST-2.zip",
    ("sentence",),
    "label",
    ("negative", "positive"),
    (67_349,),
    (872,),
    numbers=True,
)
QQP = Task(
    "QQP", "QQP-clean.zip", ("question1", "question2"), "is_duplicate", ("not_duplicate", "duplicate"),
    (363_846, 363_847, 363_848, 363_849), (40_430, 40_431), numbers=True, broken_rows=True,
)  # fmt: skip
QNLI = Task("QNLI", "QNLIv2.zip", ("question", "sentence"), "label", TWO, (104_743,), (5_463,))
MNLI = Task(
    "MNLI", "MNLI.zip", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"),
    (392_702,), (9_815,), dev="dev_matched.tsv",
)  # fmt: skip
RTE = Task("RTE", "RTE.zip", ("sentence1", "sentence2"), "label", TWO, (2_490,), (277,))

Check = Annotated[bool, "refuse files whose counts differ from the published ones"]


@dataclass(frozen=True)
class Sst2(DataSection):
    name: str = "sst2"
    check: Check = True

    published: ClassVar[Published] = Published(67_349, 2, "text")

    def load(self) -> Source:
        return load(self, SST2, self.check)


@dataclass(frozen=True)
class Qqp(DataSection):
    name: str = "qqp"
    check: Check = True

    published: ClassVar[Published] = Published(363_846, 2, "text")

    def load(self) -> Source:
        return load(self, QQP, self.check)


@dataclass(frozen=True)
class Qnli(DataSection):
    name: str = "qnli"
    check: Check = True

    published: ClassVar[Published] = Published(104_743, 2, "text")

    def load(self) -> Source:
        return load(self, QNLI, self.check)


@dataclass(frozen=True)
class Mnli(DataSection):
    name: str = "mnli"
    check: Check = True

    published: ClassVar[Published] = Published(392_702, 3, "text")

    def load(self) -> Source:
        return load(self, MNLI, self.check)


@dataclass(frozen=True)
class Rte(DataSection):
    name: str = "rte"
    check: Check = True

    published: ClassVar[Published] = Published(2_490, 2, "text")

    def load(self) -> Source:
        return load(self, RTE, self.check)


def load(section: DataSection, task: Task, check: bool) -> Source:
    what = f"its folder {task.folder} with train.tsv and {task.dev}"
    path = path_of(section, what, task.url)
    files = find(path, task)
    with reading(path):
        key = key_of(section.name, VERSION, files, {"check": check})
    arrays = cached(key, lambda: build(files, task, check))
    train, test = (
        Table(inputs(part, arrays, task), np.asarray(arrays[f"{part}.labels"]))
        for part in ("train", "test")
    )
    skipped = int(arrays["skipped"][0])
    notes = (f"{skipped} broken rows of {files[0]} are left out",) if skipped else ()
    return Source(train, test, classes=task.classes, kind="text", fingerprint=key, notes=notes)


def find(path: Path, task: Task) -> list[Path]:
    names = ("train.tsv", task.dev)
    for folder in (path, path / task.folder):
        there = [name for name in names if (folder / name).is_file()]
        if len(there) == 2:
            return [folder / name for name in names]
        if there:
            absent = names[1 - names.index(there[0])]
            raise DpfedError(
                f"{folder} has {there[0]} but no {absent}: unpack all of {task.url} there, both files are needed"
            )
    raise DpfedError(
        f"{path} has no train.tsv and no {task.folder}/train.tsv: unpack {task.url} and set data.path to its folder"
    )


def build(files: list[Path], task: Task, check: bool) -> Arrays:
    out: Arrays = {}
    skipped = 0
    for part, file, counts in zip(("train", "test"), files, (task.train, task.test), strict=True):
        columns, labels, broken = read_tsv(file, task)
        if check:
            expect_count(len(labels), counts, str(file), task.url)
        for i, texts in enumerate(columns):
            out |= pack_text(f"{part}.{i}", texts)
        out[f"{part}.labels"] = np.array(labels, dtype=np.int64)
        skipped += broken
    return {**out, "skipped": np.array([skipped])}


def inputs(part: str, arrays: Arrays, task: Task) -> dict[str, np.ndarray]:
    names = ("text", "text_pair")[: len(task.texts)]
    return {name: unpack_text(f"{part}.{i}", arrays) for i, name in enumerate(names)}


def read_tsv(file: Path, task: Task) -> tuple[list[list[str]], list[int], int]:
    """The text columns, the class numbers, and how many broken rows were left out."""
    lines = lines_of(read_bytes(file), str(file))
    header = next(lines, "").split("\t")
    for name in (*task.texts, task.label):
        if name not in header:
            raise DpfedError(
                f"{file} has no column {name!r} in its first line: download {task.url} again"
            )
    at, label_at = [header.index(name) for name in task.texts], header.index(task.label)
    number = {str(i) if task.numbers else name: i for i, name in enumerate(task.classes)}
    columns: list[list[str]] = [[] for _ in at]
    labels, broken = [], 0
    for row, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) != len(header):
            if task.broken_rows:
                broken += 1
                continue
            raise DpfedError(
                f"line {row} of {file} has {len(cells)} columns, not {len(header)}: download {task.url} again"
            )
        if cells[label_at] not in number:
            raise DpfedError(
                f"line {row} of {file} has label {cells[label_at][:40]!r}; it must be one of {', '.join(number)}"
            )
        for column, i in zip(columns, at, strict=True):
            column.append(cells[i])
        labels.append(number[cells[label_at]])
    if not labels:
        raise DpfedError(f"{file} has no rows: download {task.url} again")
    return columns, labels, broken

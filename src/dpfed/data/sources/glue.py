"""GLUE (Wang et al. 2019): SST-2, QQP, QNLI, MNLI and RTE from the published TSV files.

`data.path` is a task's folder (with train.tsv and dev.tsv) or the folder that contains the task's
folder (SST-2, QQP, QNLI, MNLI or RTE). The published test sets have no labels, so the development
set is the test set here. For MNLI this is dev_matched.tsv.

The files have no quoting: a quotation mark is a plain character. Columns are found by the names in
the first line. A row with more or fewer columns than the first line is an error. QQP is an
exception: a few of its questions contain a line break, which splits the row. Such broken rows are
left out, and a note to the user counts them.
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
TWO = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Task:
    """The published files of one GLUE task, and how to read them.

    folder       name of the folder that the archive contains
    archive      file name of the archive
    texts        names of the columns with the sentence, or with the two sentences
    label        name of the label column
    classes      names of the classes, in the order of their numbers
    train, test  accepted numbers of records; QQP has several, because programs that read QQP
                 differ in the rows that they leave out
    numbers      True if the labels in the files are 0 and 1, not names of classes
    dev          file of the development set
    broken_rows  True to leave out rows with a wrong number of columns, False to refuse them
    """

    folder: str
    archive: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    train: tuple[int, ...]
    test: tuple[int, ...]
    numbers: bool = False
    dev: str = "dev.tsv"
    broken_rows: bool = False

    @property
    def url(self) -> str:
        return URL + self.archive


@dataclass(frozen=True)
class Glue(DataSection):
    """Base class of the GLUE data sources; each subclass sets `task`."""

    check: Annotated[bool, "refuse files whose counts differ from the published ones"] = True

    task: ClassVar[Task]

    @property
    def published(self) -> Published:
        return Published(self.task.train[0], len(self.task.classes), "text")

    def load(self) -> Source:
        task = self.task
        path = path_of(self, f"its folder {task.folder} with train.tsv and {task.dev}", task.url)
        files = find(path, task)
        with reading(path):
            key = key_of(self.name, VERSION, files, {"check": self.check})
        arrays = cached(key, lambda: build(files, task, self.check))
        skipped = int(arrays["skipped"][0])
        notes = (f"{skipped} broken rows of {files[0]} are left out",) if skipped else ()
        return Source(
            train=_table("train", arrays, task),
            test=_table("test", arrays, task),
            classes=task.classes,
            kind="text",
            fingerprint=key,
            notes=notes,
        )


@dataclass(frozen=True)
class Sst2(Glue):
    name: str = "sst2"
    task: ClassVar[Task] = Task(
        "SST-2",
        "SST-2.zip",
        ("sentence",),
        "label",
        ("negative", "positive"),
        train=(67_349,),
        test=(872,),
        numbers=True,
    )


@dataclass(frozen=True)
class Qqp(Glue):
    name: str = "qqp"
    task: ClassVar[Task] = Task(
        "QQP",
        "QQP-clean.zip",
        ("question1", "question2"),
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        train=(363_846, 363_847, 363_848, 363_849),
        test=(40_430, 40_431),
        numbers=True,
        broken_rows=True,
    )


@dataclass(frozen=True)
class Qnli(Glue):
    name: str = "qnli"
    task: ClassVar[Task] = Task(
        "QNLI", "QNLIv2.zip", ("question", "sentence"), "label", TWO, (104_743,), (5_463,)
    )


@dataclass(frozen=True)
class Mnli(Glue):
    name: str = "mnli"
    task: ClassVar[Task] = Task(
        "MNLI",
        "MNLI.zip",
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        train=(392_702,),
        test=(9_815,),
        dev="dev_matched.tsv",
    )


@dataclass(frozen=True)
class Rte(Glue):
    name: str = "rte"
    task: ClassVar[Task] = Task(
        "RTE", "RTE.zip", ("sentence1", "sentence2"), "label", TWO, (2_490,), (277,)
    )


def find(path: Path, task: Task) -> list[Path]:
    """Return the paths of the training and development files, in `path` or a folder inside it."""
    names = ("train.tsv", task.dev)
    for folder in (path, path / task.folder):
        found = [name for name in names if (folder / name).is_file()]
        if len(found) == 2:
            return [folder / name for name in names]
        if found:
            absent = names[1 - names.index(found[0])]
            raise DpfedError(
                f"{folder} has {found[0]} but no {absent}: unpack all of {task.url} there, "
                "both files are needed"
            )
    raise DpfedError(
        f"{path} has no train.tsv and no {task.folder}/train.tsv: unpack {task.url} and set "
        "data.path to its folder"
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


def _table(part: str, arrays: Arrays, task: Task) -> Table:
    names = ("text", "text_pair")[: len(task.texts)]
    inputs = {name: unpack_text(f"{part}.{i}", arrays) for i, name in enumerate(names)}
    return Table(inputs, np.asarray(arrays[f"{part}.labels"]))


def read_tsv(file: Path, task: Task) -> tuple[list[list[str]], list[int], int]:
    """Return a file's text columns, its class numbers, and the number of broken rows left out.

    A text column is a list with one text per row. A broken row has a wrong number of columns.
    """
    lines = lines_of(read_bytes(file), str(file))
    header = next(lines, "").split("\t")
    for name in (*task.texts, task.label):
        if name not in header:
            raise DpfedError(
                f"{file} has no column {name!r} in its first line: download {task.url} again"
            )
    columns = [header.index(name) for name in task.texts]
    label_at = header.index(task.label)
    numbers = {str(i) if task.numbers else name: i for i, name in enumerate(task.classes)}
    texts: list[list[str]] = []
    labels: list[int] = []
    broken = 0
    for row, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) == len(header):
            if cells[label_at] not in numbers:
                raise DpfedError(
                    f"line {row} of {file} has label {cells[label_at][:40]!r}; "
                    f"it must be one of {', '.join(numbers)}"
                )
            texts.append([cells[i] for i in columns])
            labels.append(numbers[cells[label_at]])
        elif task.broken_rows:
            broken += 1
        else:
            raise DpfedError(
                f"line {row} of {file} has {len(cells)} columns, not {len(header)}: "
                f"download {task.url} again"
            )
    if not labels:
        raise DpfedError(f"{file} has no rows: download {task.url} again")
    return list(map(list, zip(*texts, strict=True))), labels, broken

"""Tables of records. A data source has two: the clients' private records and a public test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dpfed.config import LabelTask
from dpfed.errors import DpfedError

Kind = Literal["image", "features", "text"]


@dataclass(frozen=True)
class Table:
    """The records of one table, as arrays with one row per record.

    inputs   the model's inputs, by the name of the model's argument:
             `pixel_values` [n, channels, height, width], `features` or texts
    labels   the labels; zeros if the data have no labels
    columns  other columns by name; one of them can name the client or unit of each record

    Language data has the inputs `text` and, for pairs, `text_pair`; or `prompt` and `completion`;
    or `messages`, a chat as JSON. These are arrays of Python strings.

    Labels are class numbers `[n]`, real numbers `[n]` for the task "regress", or one 0 or 1 for
    each class, `[n, classes]`, for "multilabel".
    """

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_numbers(self) -> np.ndarray:
        """The class number of each record; zeros if the labels are not classes."""
        if self.labels.dtype.kind == "i":
            return self.labels
        return np.zeros(len(self.labels), dtype=np.int64)

    def column(self, name: str | None) -> np.ndarray | None:
        if name is None:
            return None
        if name not in self.columns:
            have = ", ".join(self.columns) or "none"
            raise DpfedError(f"the data has no column {name!r}; its columns are: {have}")
        return self.columns[name]


@dataclass(frozen=True)
class Published:
    """Facts about a published data set, from which a run can be planned before the download.

    records  number of training records
    classes  number of classes
    shape    shape of one image; () for text
    """

    records: int
    classes: int
    kind: Kind
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A loaded data set: the two tables, and facts about them.

    train        the clients' private records
    test         the server's public test set
    classes      names of the classes, in the order of their numbers; () for data without labels;
                 for "regress", the name of the label
    white        largest possible pixel value, such as 255
    declared     True if the number of classes is public, False if it was taken from the labels
    fingerprint  text that identifies the raw data in cache keys; "" if unknown
    notes        remarks about the files, which the user sees
    clients      names of the clients, if the user gave a separate data set for each; else ()
    task         meaning of a label: a class, a number ("regress") or a set of classes
    """

    train: Table
    test: Table
    classes: tuple[str, ...]
    kind: Kind
    white: float = 255.0
    declared: bool = True
    fingerprint: str = ""
    notes: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    task: LabelTask = "classify"

    def __post_init__(self) -> None:
        for part, table in (("training", self.train), ("test", self.test)):
            if len(table) == 0:
                raise DpfedError(f"the {part} set has no records")
            for name, x in table.inputs.items():
                if len(x) != len(table):
                    raise DpfedError(
                        f"the {part} set has {len(x)} rows of {name} and {len(table)} labels"
                    )
            if self.classes and self.task == "classify":
                expect_labels(table.labels, len(self.classes), f"the {part} set")


def expect_labels(labels: np.ndarray, classes: int, label: str, remedy: str = "") -> None:
    """Raise DpfedError for the first record whose label is outside 0 to classes - 1."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise DpfedError(
            f"record {bad[0]} of {label} has label {labels[bad[0]]}; "
            f"labels are 0 to {classes - 1}{remedy}"
        )

"""Tables of records: every source has the clients' private records and a public test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dpfed.errors import DpfedError

Kind = Literal["image", "features", "text"]


@dataclass(frozen=True)
class Table:
    """Inputs by the model's argument name, labels, and columns that name clients or units.

    Images are `pixel_values` [n, channels, height, width]. Text is `text` and, for pairs,
    `text_pair`: arrays of Python strings, which a text model turns into tokens.
    """

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def column(self, name: str | None) -> np.ndarray | None:
        if name is None:
            return None
        if name not in self.columns:
            have = ", ".join(self.columns) or "none"
            raise DpfedError(f"the data has no column {name!r}; its columns are: {have}")
        return self.columns[name]


@dataclass(frozen=True)
class Published:
    """Public facts of a published data set, enough to plan a run without its files.

    records  number of training records
    shape    shape of one image, empty for text
    """

    records: int
    classes: int
    kind: Kind
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A loaded data set.

    classes      names of the labels 0..n-1
    white        pixel value of full intensity, for images of whole numbers
    declared     True if the number of classes is public, False if it was read off the labels
    fingerprint  key of the raw data for caches of derived data; "" if unknown
    notes        remarks for the user about the files
    """

    train: Table
    test: Table
    classes: tuple[str, ...]
    kind: Kind
    white: float = 255.0
    declared: bool = True
    fingerprint: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, table in (("training", self.train), ("test", self.test)):
            if len(table) == 0:
                raise DpfedError(f"the {part} set has no records")
            for name, x in table.inputs.items():
                if len(x) != len(table):
                    raise DpfedError(
                        f"the {part} set has {len(x)} rows of {name} and {len(table)} labels"
                    )
            expect_labels(table.labels, len(self.classes), f"the {part} set")


def expect_labels(labels: np.ndarray, classes: int, label: str, remedy: str = "") -> None:
    """Raise DpfedError for the first label outside 0 to classes - 1."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise DpfedError(
            f"record {bad[0]} of {label} has label {labels[bad[0]]}; "
            f"labels are 0 to {classes - 1}{remedy}"
        )

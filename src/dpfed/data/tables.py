"""What every data source gives: two tables, the clients' private records and the server's public test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dpfed.errors import DpfedError

Kind = Literal["image", "features", "text"]


@dataclass(frozen=True)
class Table:
    """Records row by row: inputs by the model's argument name, labels, and columns that name clients or units.

    Images are `pixel_values` [n, channels, height, width]. Text is `text` and, for pairs, `text_pair`: arrays of Python
    strings, which a text model turns into tokens.
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
    """What is known of a published data set without its files: enough for a plan and for a model's shapes.

    records  training records; shape  of one image, empty for text
    """

    records: int
    classes: int
    kind: Kind
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A loaded data set.

    classes  names of the labels 0..n-1
    white    for images of whole numbers: the value that means full intensity
    declared whether the number of classes is public knowledge, rather than read off the labels
    fingerprint  names the raw data and how it was read, for caches of what is computed from it; "" where unknown
    notes    what a person should know about how the files were read
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
            bad = np.flatnonzero((table.labels < 0) | (table.labels >= len(self.classes)))
            if len(bad):
                raise DpfedError(
                    f"record {bad[0]} of the {part} set has label {table.labels[bad[0]]}; "
                    f"labels are 0 to {len(self.classes) - 1}"
                )

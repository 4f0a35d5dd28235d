"""A user's own arrays in one NumPy archive: images or feature vectors, client and unit columns.

    np.savez("my.npz", x_train=..., y_train=..., x_test=..., y_test=..., train_hospital=...)

`x` holds images if it is uint8 [n, channels, height, width], and features if it is float
[n, features].

`y` holds class numbers, or numbers for `model.task = "regress"`, or `[n, classes]` of 0 and 1 for
"multilabel".

`train_NAME` has one value per training record, such as the client or unit of the record. Set
`data.client_column` or `data.unit_column` to NAME.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from dpfed.config import DataSection, LabelTask
from dpfed.data.labels import MOST_CLASSES, Column, Encoded, encode_as
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError, reason

NEEDED = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Npz(DataSection):
    tasks = ("classify", "regress", "multilabel")

    name: str = "npz"
    classes: Annotated[
        int | None, Ge(2), "number of classes; default: as many as the labels show"
    ] = None

    def load(self, task: LabelTask = "classify") -> Source:
        if self.path is None:
            raise DpfedError(
                'data.name = "npz" reads a file: set data.path to an .npz archive with '
                + ", ".join(NEEDED)
            )
        arrays = self._read(Path(self.path))
        missing = [name for name in NEEDED if name not in arrays]
        if missing:
            raise DpfedError(f"{self.path} has no array {missing[0]}; it needs {', '.join(NEEDED)}")
        x = arrays["x_train"]
        image = x.ndim == 4 and x.dtype == np.uint8
        if not image and not (x.ndim == 2 and x.dtype.kind == "f"):
            raise DpfedError(
                f"x_train of {self.path} has shape {x.shape} and type {x.dtype}: "
                "it must be uint8 [n, c, h, w] or float [n, d]"
            )
        name = "pixel_values" if image else "features"
        labels = self._encoded(arrays, task)
        train, test = labels.parts
        return Source(
            train=Table({name: self._inputs(arrays, "train")}, train, self._columns(arrays, train)),
            test=Table({name: self._inputs(arrays, "test")}, test),
            classes=labels.names,
            kind="image" if image else "features",
            declared=labels.declared,
            task=task,
        )

    def _encoded(self, arrays: dict[str, np.ndarray], task: LabelTask) -> Encoded:
        """Return the labels of both parts, as class numbers, real numbers or sets of classes."""
        if task != "classify":
            axes = 1 if task == "regress" else 2
            columns = []
            for name in ("y_train", "y_test"):
                rows = arrays[name]
                if rows.ndim != axes or len(rows) == 0:
                    raise DpfedError(
                        f"{name} of {self.path} has shape {rows.shape}: model.task = "
                        '"regress" needs [n], and "multilabel" needs [n, classes]'
                    )
                places = [f"row {i} of {name} in {self.path}" for i in range(len(rows))]
                columns.append(Column(list(rows.tolist()), places))
            return encode_as(task, columns, self.classes, "y")
        parts = (self._labels(arrays, "train"), self._labels(arrays, "test"))
        shown = 1 + int(max(part.max() for part in parts))
        names = tuple(map(str, range(shown if self.classes is None else self.classes)))
        return Encoded(parts, names, self.classes is not None)

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        try:
            archive = np.load(path, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds a single array; np.savez writes several")
            with archive:
                arrays = {key: archive[key] for key in archive.files}
        except Exception as error:
            # Catch all errors, because numpy and zipfile raise many classes for damaged files.
            raise DpfedError(f"{path} cannot be read as an .npz archive: {reason(error)}") from None
        return {key: value for key, value in arrays.items() if isinstance(value, np.ndarray)}

    def _labels(self, arrays: dict[str, np.ndarray], part: str) -> np.ndarray:
        labels = arrays[f"y_{part}"]
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0:
            raise DpfedError(f"y_{part} of {self.path} must be a non-empty list of whole numbers")
        if labels.max() >= MOST_CLASSES:
            raise DpfedError(
                f"y_{part} of {self.path} has label {labels.max()}: number the classes 0, 1, 2, ..."
            )
        return labels.astype(np.int64)

    def _inputs(self, arrays: dict[str, np.ndarray], part: str) -> np.ndarray:
        """Return the array `x_train` or `x_test`.

        Raise DpfedError if a value is not finite, or if `x_test` has another type or record shape
        than `x_train`.
        """
        x = arrays[f"x_{part}"]
        like = arrays["x_train"]
        same = x.ndim == like.ndim and x.shape[1:] == like.shape[1:]
        wide = like.dtype == np.uint8 and x.dtype != np.uint8
        if not same or x.dtype.kind != like.dtype.kind or wide or 0 in x.shape[1:]:
            raise DpfedError(
                f"x_{part} of {self.path} has shape {x.shape} and type {x.dtype}, x_train "
                f"{like.shape} and {like.dtype}: all records must be of one kind, and none empty"
            )
        if like.dtype == np.uint8:
            return x
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
        # Refuse values that are not finite. Training would silently ignore such a record, and a
        # test loss would be NaN.
        if len(bad):
            raise DpfedError(
                f"row {bad[0]} of x_{part} in {self.path} is not finite in single precision: "
                "mend or drop it"
            )
        return x

    def _columns(self, arrays: dict[str, np.ndarray], labels: np.ndarray) -> dict[str, np.ndarray]:
        found = {
            key.removeprefix("train_"): value
            for key, value in arrays.items()
            if key.startswith("train_")
        }
        for name in (self.client_column, self.unit_column):
            if name in found and found[name].shape != labels.shape:
                raise DpfedError(
                    f"train_{name} of {self.path} has shape {found[name].shape}: a column has one "
                    f"value for each of the {len(labels)} training records"
                )
        return {name: value for name, value in found.items() if value.shape == labels.shape}

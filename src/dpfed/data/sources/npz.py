"""A user's own arrays in one NumPy archive: images or feature vectors, with optional client and unit columns.

    np.savez("my.npz", x_train=..., y_train=..., x_test=..., y_test=..., train_hospital=...)

`x` of shape [n, channels, height, width] and type uint8 is images, [n, features] of a float type is features.
`train_NAME` is a column of the training records for `data.client_column` or `data.unit_column`.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfed.config import DataSection
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError

NEEDED = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Npz(DataSection):
    name: str = "npz"

    def load(self) -> Source:
        if self.path is None:
            raise DpfedError("data.name = \"npz\" reads a file: set data.path to an .npz archive with " + ", ".join(NEEDED))
        arrays = self._read(Path(self.path))
        missing = [name for name in NEEDED if name not in arrays]
        if missing:
            raise DpfedError(f"{self.path} has no array {missing[0]}; it needs {', '.join(NEEDED)}")
        image = arrays["x_train"].ndim == 4 and arrays["x_train"].dtype == np.uint8
        if not image and not (arrays["x_train"].ndim == 2 and arrays["x_train"].dtype.kind == "f"):
            shape, kind = arrays["x_train"].shape, arrays["x_train"].dtype
            raise DpfedError(
                f"x_train of {self.path} has shape {shape} and type {kind}: it must be uint8 [n, c, h, w] or float [n, d]"
            )
        labels = {part: self._labels(arrays[f"y_{part}"], part) for part in ("train", "test")}
        columns = {
            key.removeprefix("train_"): value
            for key, value in arrays.items()
            if key.startswith("train_") and len(value) == len(labels["train"])
        }
        name = "pixel_values" if image else "features"
        dtype = np.uint8 if image else np.float32
        return Source(
            train=Table({name: arrays["x_train"].astype(dtype)}, labels["train"], columns),
            test=Table({name: arrays["x_test"].astype(dtype)}, labels["test"]),
            classes=tuple(str(c) for c in range(int(max(labels["train"].max(), labels["test"].max())) + 1)),
            kind="image" if image else "features",
        )

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        try:
            with np.load(path, allow_pickle=False) as archive:
                return {key: archive[key] for key in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            raise DpfedError(f"{path} cannot be read as an .npz archive: {error}") from None

    def _labels(self, labels: np.ndarray, part: str) -> np.ndarray:
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0:
            raise DpfedError(f"y_{part} of {self.path} must be a non-empty list of whole numbers")
        return labels.astype(np.int64)

"""Data that a program hands over instead of files: columns of any kind, from a dictionary, a data frame or a
Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfed.config import DataSection
from dpfed.data.tables import Kind, Source, Table
from dpfed.errors import DpfedError

LABELS = ("label", "labels", "y")
TEXTS = ("text", "sentence", "sentence1", "premise", "question")
PAIRS = ("text_pair", "sentence2", "hypothesis")
IMAGES = ("image", "img", "pixel_values", "x")
FEATURES = ("features", "x")


@dataclass(frozen=True)
class Given(DataSection):
    name: str = "given"

    def load(self) -> Source:
        raise DpfedError(
            "this run's data were handed over by a program, so only that program can give them again: call "
            "dpfed.fine_tune there, or put them into files and use another data.name"
        )


def source_of(train: Any, test: Any, classes: Sequence[str] | None = None) -> Source:
    """Two tables of the same columns. What the columns are follows from their names and types."""
    if train is test:
        raise DpfedError("test is train: the test set is public and must be other records")
    parts = {"train": _table(train, "train"), "test": _table(test, "test")}
    (first, kind), (second, other) = parts["train"], parts["test"]
    if kind != other or first.inputs.keys() != second.inputs.keys():
        raise DpfedError(f"train has {kind} {sorted(first.inputs)} and test has {other} {sorted(second.inputs)}")
    named = list(classes) if classes is not None else _names(train)
    top = int(max(first.labels.max(initial=0), second.labels.max(initial=0))) + 1
    found = tuple(named) if named else tuple(str(c) for c in range(top))
    return Source(first, second, found, kind, declared=bool(named))


def _table(data: Any, part: str) -> tuple[Table, Kind]:
    columns = _columns(data, part)
    label = _pick(columns, LABELS)
    if label is None:
        raise DpfedError(f"{part} has no column called {' or '.join(LABELS)}; it has: {', '.join(columns)}")
    labels = np.asarray(columns[label])
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or len(labels) == 0:
        raise DpfedError(f"the column {label} of {part} must be a non-empty list of whole numbers, one for each record")
    inputs, kind, used = _inputs(columns, part)
    for name, values in inputs.items():
        if len(values) != len(labels):
            raise DpfedError(f"{part} has {len(labels)} labels and {len(values)} of {name}")
    rest = {name: np.asarray(values) for name, values in columns.items() if name not in {label, *used}}
    flat = {name: values for name, values in rest.items() if values.shape == labels.shape}
    return Table(inputs, labels.astype(np.int64), flat), kind


def _columns(data: Any, part: str) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    names = getattr(data, "column_names", None)
    names = list(data.columns) if names is None and hasattr(data, "columns") else names
    if not names:
        raise DpfedError(
            f"{part} must be a dictionary of columns, a data frame or a dataset, not {type(data).__name__}"
        )
    return {str(name): data[name] for name in names}


def _pick(columns: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _inputs(columns: Mapping[str, Any], part: str) -> tuple[dict[str, np.ndarray], Kind, set[str]]:
    text, pair = _pick(columns, TEXTS), _pick(columns, PAIRS)
    if text is not None:
        names = {"text": text} if pair is None else {"text": text, "text_pair": pair}
        return {key: _strings(columns[name], name, part) for key, name in names.items()}, "text", set(names.values())
    image = _pick(columns, IMAGES)
    if image is not None and not _is_float(columns[image]):
        return {"pixel_values": _pixels(columns[image], image, part)}, "image", {image}
    plain = _pick(columns, FEATURES)
    if plain is not None:
        values = np.asarray(columns[plain], dtype=np.float32)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise DpfedError(f"the column {plain} of {part} must be finite numbers, one row for each record")
        return {"features": values}, "features", {plain}
    raise DpfedError(
        f"{part} has no column that a model reads: call one {TEXTS[0]!r}, {IMAGES[0]!r} or {FEATURES[0]!r}; it has: "
        f"{', '.join(columns)}"
    )


def _is_float(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype.kind == "f"


def _strings(values: Any, name: str, part: str) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise DpfedError(f"row {i} of the column {name} of {part} is no text but {type(value).__name__}")
        out[i] = value
    return out


def _pixels(values: Any, name: str, part: str) -> np.ndarray:
    """uint8 [n, channels, height, width], from such an array or from pictures of one size."""
    if isinstance(values, np.ndarray) and values.ndim == 4 and values.dtype == np.uint8:
        return values
    rows = []
    for i, picture in enumerate(values):
        if hasattr(picture, "convert"):
            picture = picture.convert("L" if picture.mode in ("L", "1") else "RGB")
        pixels = np.asarray(picture)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise DpfedError(f"row {i} of the column {name} of {part} is no picture of whole numbers from 0 to 255")
        rows.append(pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0))
        if rows[-1].shape != rows[0].shape:
            raise DpfedError(
                f"row {i} of the column {name} of {part} has shape {pixels.shape}, unlike row 0: pictures must be of one size"
            )
    if not rows:
        raise DpfedError(f"the column {name} of {part} is empty")
    return np.ascontiguousarray(np.stack(rows))


def _names(data: Any) -> list[str]:
    """Class names that a dataset states itself."""
    features = getattr(data, "features", None) or {}
    label = _pick(features, LABELS) if isinstance(features, Mapping) else None
    return list(getattr(features[label], "names", None) or []) if label else []

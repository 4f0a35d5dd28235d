"""Columns that a program hands over to `dpfed.fine_tune` instead of files.

They come from a dictionary, a data frame or a Hugging Face dataset; what they are follows from their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfed.config import DataSection
from dpfed.data.tables import Kind, Source, Table
from dpfed.errors import DpfedError

LABELS = ("label", "labels", "y")
PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
)
TEXTS = ("text", "sentence")
IMAGES = ("image", "img", "pixel_values")
FEATURES = ("features",)
EITHER = "x"  # pictures, or rows of numbers


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
    for name, x in first.inputs.items():
        if x.shape[1:] != second.inputs[name].shape[1:]:
            raise DpfedError(
                f"a record of train has shape {x.shape[1:]} and one of test {second.inputs[name].shape[1:]}"
            )
    named = list(classes) if classes is not None else _names(train)
    top = int(max(first.labels.max(initial=0), second.labels.max(initial=0))) + 1
    found = tuple(named) if named else tuple(str(c) for c in range(top))
    return Source(first, second, found, kind, declared=bool(named))


def _table(data: Any, part: str) -> tuple[Table, Kind]:
    columns = _columns(data, part)
    label = _pick(columns, LABELS)
    if label is None:
        raise DpfedError(f"{part} has no column called {' or '.join(LABELS)}; it has: {', '.join(columns)}")
    labels = _array(columns[label])
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or len(labels) == 0:
        raise DpfedError(f"the column {label} of {part} must be a non-empty list of whole numbers, one for each record")
    inputs, kind, used = _inputs(columns, part)
    for name, values in inputs.items():
        if len(values) != len(labels):
            raise DpfedError(f"{part} has {len(labels)} labels and {len(values)} of {name}")
    rest = {name: _array(values) for name, values in columns.items() if name not in {label, *used} and _plain(values)}
    flat = {name: values for name, values in rest.items() if values.shape == labels.shape}
    return Table(inputs, labels.astype(np.int64), flat), kind


def _array(values: Any) -> np.ndarray:
    """Rows of different lengths make an array without a shape, which the caller refuses."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty((), dtype=object)


def _plain(values: Any) -> bool:
    """A column that can name clients or units. What else there is stays unread: it may be large."""
    return len(values) > 0 and isinstance(next(iter(values)), str | int | float | np.generic)


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
    pair = next((two for two in PAIRS if two[0] in columns and two[1] in columns), None)
    text = _pick(columns, TEXTS)
    names = {"text": pair[0], "text_pair": pair[1]} if pair else {"text": text} if text else {}
    if names:
        return {key: _strings(columns[name], name, part) for key, name in names.items()}, "text", set(names.values())
    picture = EITHER in columns and _is_picture(columns[EITHER])
    image = _pick(columns, (*IMAGES, EITHER) if picture else IMAGES)
    if image is not None:
        return {"pixel_values": _pixels(columns[image], image, part)}, "image", {image}
    plain = _pick(columns, (*FEATURES, EITHER))
    if plain is not None:
        values = _array(columns[plain])
        values = values.astype(np.float32) if values.dtype.kind in "iufb" else values
        if values.ndim != 2 or values.dtype != np.float32 or not np.isfinite(values).all():
            raise DpfedError(f"the column {plain} of {part} must be finite numbers, one row for each record")
        return {"features": values}, "features", {plain}
    raise DpfedError(
        f"{part} has no column that a model reads: call one {TEXTS[0]!r}, {IMAGES[0]!r} or {FEATURES[0]!r}; it has: "
        f"{', '.join(columns)}"
    )


def _is_picture(values: Any) -> bool:
    first = next(iter(values), None)
    return hasattr(first, "convert") or _array(first).ndim >= 2


def _strings(values: Any, name: str, part: str) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise DpfedError(f"row {i} of the column {name} of {part} is no text but {type(value).__name__}")
        out[i] = value
    return out


def _pixels(values: Any, name: str, part: str) -> np.ndarray:
    """uint8 [n, channels, height, width], from an array or from pictures of one size; grey ones among colours are
    repeated."""
    rows: list[np.ndarray] = []
    for i, picture in enumerate(values):
        pixels = _channels_first(picture)
        if pixels is None:
            raise DpfedError(
                f"row {i} of the column {name} of {part} is no picture of whole numbers from 0 to 255 (uint8) with 1 or 3 "
                "channels"
            )
        rows.append(pixels)
        if pixels.shape[1:] != rows[0].shape[1:]:
            raise DpfedError(
                f"row {i} of the column {name} of {part} has {pixels.shape[1]} x {pixels.shape[2]} pixels and row 0 has "
                f"{rows[0].shape[1]} x {rows[0].shape[2]}: pictures must be of one size"
            )
    if not rows:
        raise DpfedError(f"the column {name} of {part} is empty")
    channels = max(len(row) for row in rows)
    return np.ascontiguousarray(np.stack([np.broadcast_to(row, (channels, *row.shape[1:])) for row in rows]))


def _channels_first(picture: Any) -> np.ndarray | None:
    """[channels, height, width] of one picture; of an array whose first and last axis could both be channels, the first."""
    if hasattr(picture, "convert"):
        pixels = np.asarray(picture.convert("L" if picture.mode in ("L", "1") else "RGB"))
        return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    pixels = _array(picture)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or 0 in pixels.shape:
        return None
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.shape[0] in (1, 3):
        return pixels
    return np.moveaxis(pixels, -1, 0) if pixels.shape[-1] in (1, 3) else None


def _names(data: Any) -> list[str]:
    """Class names that a dataset states itself."""
    features = getattr(data, "features", None) or {}
    label = _pick(features, LABELS) if isinstance(features, Mapping) else None
    return list(getattr(features[label], "names", None) or []) if label else []

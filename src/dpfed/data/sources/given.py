"""Columns that a program hands over to `dpfed.fine_tune` instead of files.

They come from a dictionary, a data frame or a Hugging Face dataset; what they are follows from their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpfed.config import DataSection
from dpfed.data.columns import is_missing
from dpfed.data.labels import Column, Encoded, encode
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


def source_of(train: Any, test: Any, classes: Sequence[str] | int | None = None) -> Source:
    """Return two tables of the same columns; names and types of the columns say what they are.

    classes  names of the classes in the order of their numbers, or how many there are
    """
    if train is test:
        raise DpfedError("test is train: the test set is public and must be other records")
    labels = _labels(train, test, classes)
    first, kind = _table(train, labels.parts[0], "train")
    second, other = _table(test, labels.parts[1], "test")
    if kind != other or first.inputs.keys() != second.inputs.keys():
        raise DpfedError(
            f"train has {kind} {sorted(first.inputs)} and test has {other} {sorted(second.inputs)}"
        )
    for name, x in first.inputs.items():
        if x.shape[1:] != second.inputs[name].shape[1:]:
            raise DpfedError(
                f"a record of train has shape {x.shape[1:]} and one of test {second.inputs[name].shape[1:]}"
            )
    return Source(first, second, labels.names, kind, declared=labels.declared)


def _labels(train: Any, test: Any, classes: Sequence[str] | int | None) -> Encoded:
    """Return the class numbers of both parts, from names or numbers in the label column."""
    parts = [_label_column(data, part) for data, part in ((train, "train"), (test, "test"))]
    columns = [column for column, _ in parts]
    if classes is not None:
        return encode(columns, _declared(classes))
    stated = _names(train)
    if stated and all(isinstance(value, int) for column in columns for value in column.values):
        # The numbers of a dataset with named classes are places in that list of names.
        return replace(encode(columns, len(stated)), names=tuple(stated))
    if stated:
        return encode(columns, tuple(stated))
    categories = parts[0][1]
    if len(categories) > 1 and categories == parts[1][1]:
        # A data frame makes categories of the labels it holds, so they are no declaration.
        return replace(encode(columns, categories), declared=False)
    for column in columns:
        _refuse_negative(column)
    return encode(columns, None)


def _declared(classes: Sequence[str] | int) -> tuple[str, ...] | int:
    if isinstance(classes, int):
        if classes < 2:
            raise DpfedError(f"classes = {classes} must be at least 2")
        return classes
    if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray):
        raise DpfedError(f"classes must be a list of names or their number, not {classes!r:.60}")
    return tuple(str(name) for name in classes)


def _label_column(data: Any, part: str) -> tuple[Column, tuple[str, ...]]:
    """Return the labels of a part, and the categories of a categorical column in their order."""
    columns = _columns(data, part)
    label = _pick(columns, LABELS)
    if label is None:
        raise DpfedError(
            f"{part} has no column called {' or '.join(LABELS)}; it has: {', '.join(columns)}"
        )
    labels = _array(columns[label])
    if labels.ndim != 1 or len(labels) == 0:
        raise DpfedError(
            f"the column {label} of {part} must be a non-empty list with one label for each record"
        )
    places = [f"row {i} of {part}" for i in range(len(labels))]
    values = [None if is_missing(value) else value for value in labels.tolist()]
    return Column(values, places), _categories(columns[label])


def _categories(values: Any) -> tuple[str, ...]:
    """Return the categories of a column of pandas, none for any other column."""
    found = getattr(getattr(values, "dtype", None), "categories", None)
    return () if found is None else tuple(str(name) for name in found)


def _refuse_negative(column: Column) -> None:
    for value, place in zip(column.values, column.places, strict=True):
        if isinstance(value, int | float) and value < 0:
            raise DpfedError(
                f"{place} has label {value}: number the classes 0, 1, 2, ..., or name every label in classes"
            )


def _table(data: Any, labels: np.ndarray, part: str) -> tuple[Table, Kind]:
    columns = _columns(data, part)
    inputs, kind, used = _inputs(columns, part)
    for name, values in inputs.items():
        if len(values) != len(labels):
            raise DpfedError(f"{part} has {len(labels)} labels and {len(values)} of {name}")
    used |= {str(_pick(columns, LABELS))}
    rest = {
        name: _array(values)
        for name, values in columns.items()
        if name not in used and _plain(values)
    }
    flat = {name: values for name, values in rest.items() if values.shape == labels.shape}
    return Table(inputs, labels, flat), kind


def _array(values: Any) -> np.ndarray:
    """Rows of different lengths make an array without a shape, which the caller refuses."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty((), dtype=object)


def _plain(values: Any) -> bool:
    """A column that can name clients or units. What else there is stays unread: it may be large."""
    kinds = str | int | float | np.generic | None
    return len(values) > 0 and isinstance(next(iter(values)), kinds)


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
        return (
            {key: _strings(columns[name], name, part) for key, name in names.items()},
            "text",
            set(names.values()),
        )
    picture = EITHER in columns and _is_picture(columns[EITHER])
    image = _pick(columns, (*IMAGES, EITHER) if picture else IMAGES)
    if image is not None:
        return {"pixel_values": _pixels(columns[image], image, part)}, "image", {image}
    plain = _pick(columns, (*FEATURES, EITHER))
    if plain is not None:
        values = _array(columns[plain])
        values = values.astype(np.float32) if values.dtype.kind in "iufb" else values
        if values.ndim != 2 or values.dtype != np.float32 or not np.isfinite(values).all():
            raise DpfedError(
                f"the column {plain} of {part} must be finite numbers, one row for each record"
            )
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
            raise DpfedError(
                f"row {i} of the column {name} of {part} is no text but {type(value).__name__}"
            )
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
    return np.ascontiguousarray(
        np.stack([np.broadcast_to(row, (channels, *row.shape[1:])) for row in rows])
    )


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

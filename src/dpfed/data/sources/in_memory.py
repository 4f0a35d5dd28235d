"""Columns that a program passes to `dpfed.fine_tune`: a dictionary, a data frame or a dataset.

The name of a column says what it holds: labels, texts, images or feature vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpfed.config import DataSection
from dpfed.data.cache import text_array
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
# A column of this name holds images if its first value is an image, else feature vectors.
EITHER = "x"


@dataclass(frozen=True)
class InMemory(DataSection):
    name: str = "given"

    def load(self) -> Source:
        raise DpfedError(
            "this run's data were handed over by a program, so only that program can give them "
            "again: call dpfed.fine_tune there, or put them into files and use another data.name"
        )


def source_of(train: Any, test: Any, classes: Sequence[str] | int | None = None) -> Source:
    """Return a source of a training and a test table with the same columns.

    classes  names of the classes in the order of their numbers, or the number of classes;
             None for the classes that occur in the tables
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
                f"a record of train has shape {x.shape[1:]} and one of test "
                f"{second.inputs[name].shape[1:]}"
            )
    return Source(first, second, labels.names, kind, declared=labels.declared)


def _labels(train: Any, test: Any, classes: Sequence[str] | int | None) -> Encoded:
    """Return the class numbers of the training and test labels, which are names or numbers."""
    parts = [_label_column(data, part) for data, part in ((train, "train"), (test, "test"))]
    columns = [column for column, _ in parts]
    if classes is not None:
        return encode(columns, _declared(classes))
    stated = _class_names(train)
    if stated and all(isinstance(value, int) for column in columns for value in column.values):
        # A dataset with named classes stores each label as a position in its list of names.
        return replace(encode(columns, len(stated)), names=stated)
    if stated:
        return encode(columns, stated)
    categories = parts[0][1]
    if len(categories) > 1 and categories == parts[1][1]:
        # pandas takes the categories from the labels. So they are private, not declared.
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
    return tuple(map(str, classes))


def _label_column(data: Any, part: str) -> tuple[Column, tuple[str, ...]]:
    """Return the labels of a table, and the categories of their column in order.

    If the column is not categorical, the categories are ().
    """
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
    # Only a column of pandas can have categories.
    categories = getattr(getattr(columns[label], "dtype", None), "categories", None)
    return Column(values, places), tuple(map(str, () if categories is None else categories))


def _class_names(data: Any) -> tuple[str, ...]:
    """Return the class names that a dataset states for its label column; () if none."""
    features = getattr(data, "features", None)
    label = _pick(features, LABELS) if isinstance(features, Mapping) else None
    if label is None:
        return ()
    return tuple(getattr(features[label], "names", None) or ())  # type: ignore[index]


def _refuse_negative(column: Column) -> None:
    for value, place in zip(column.values, column.places, strict=True):
        if isinstance(value, int | float) and value < 0:
            raise DpfedError(
                f"{place} has label {value}: number the classes 0, 1, 2, ..., "
                "or name every label in classes"
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
        if name not in used and _names_clients(values)
    }
    flat = {name: values for name, values in rest.items() if values.shape == labels.shape}
    return Table(inputs, labels, flat), kind


def _array(values: Any) -> np.ndarray:
    """Return the values as an array; its shape is () if the rows have different lengths.

    The callers raise an error for the shape ().
    """
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty((), dtype=object)


def _names_clients(values: Any) -> bool:
    """Return True if the first value of a column is a text or a number.

    Only a column of texts or numbers can name clients or units. Other columns are not read, because
    they may be large.
    """
    kinds = str | int | float | np.generic | None
    return len(values) > 0 and isinstance(next(iter(values)), kinds)


def _columns(data: Any, part: str) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    names = getattr(data, "column_names", None)
    if names is None:
        names = list(getattr(data, "columns", ()))
    if not names:
        raise DpfedError(
            f"{part} must be a dictionary of columns, a data frame or a dataset, "
            f"not {type(data).__name__}"
        )
    return {str(name): data[name] for name in names}


def _pick(columns: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _inputs(columns: Mapping[str, Any], part: str) -> tuple[dict[str, np.ndarray], Kind, set[str]]:
    """Return the model's inputs by name, their kind, and the names of the columns used."""
    singles = [(name,) for name in TEXTS]
    texts = next((c for c in (*PAIRS, *singles) if all(name in columns for name in c)), None)
    if texts is not None:
        names = zip(("text", "text_pair"), texts, strict=False)
        inputs = {key: _strings(columns[name], name, part) for key, name in names}
        return inputs, "text", set(texts)
    picture = EITHER in columns and _is_picture(columns[EITHER])
    image = _pick(columns, (*IMAGES, EITHER) if picture else IMAGES)
    if image is not None:
        return {"pixel_values": _pixels(columns[image], image, part)}, "image", {image}
    plain = _pick(columns, (*FEATURES, EITHER))
    if plain is not None:
        return {"features": _features(columns[plain], plain, part)}, "features", {plain}
    raise DpfedError(
        f"{part} has no column that a model reads: call one {TEXTS[0]!r}, {IMAGES[0]!r} or "
        f"{FEATURES[0]!r}; it has: {', '.join(columns)}"
    )


def _is_picture(values: Any) -> bool:
    first = next(iter(values), None)
    return hasattr(first, "convert") or _array(first).ndim >= 2


def _strings(values: Any, name: str, part: str) -> np.ndarray:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise DpfedError(
                f"row {i} of the column {name} of {part} is no text but {type(value).__name__}"
            )
    return text_array(list(values))


def _features(column: Any, name: str, part: str) -> np.ndarray:
    values = _array(column)
    if values.dtype.kind in "iufb":
        values = values.astype(np.float32)
    if values.ndim != 2 or values.dtype != np.float32 or not np.isfinite(values).all():
        raise DpfedError(
            f"the column {name} of {part} must be finite numbers, one row for each record"
        )
    return values


def _pixels(values: Any, name: str, part: str) -> np.ndarray:
    """Return images as uint8 [n, channels, height, width].

    If any image has colour, grey images get three equal channels.
    """
    rows: list[np.ndarray] = []
    for i, picture in enumerate(values):
        pixels = _channels_first(picture)
        if pixels is None:
            raise DpfedError(
                f"row {i} of the column {name} of {part} is no picture of whole numbers from 0 to "
                "255 (uint8) with 1 or 3 channels"
            )
        rows.append(pixels)
        if pixels.shape[1:] != rows[0].shape[1:]:
            raise DpfedError(
                f"row {i} of the column {name} of {part} has {pixels.shape[1]} x {pixels.shape[2]} "
                f"pixels and row 0 has {rows[0].shape[1]} x {rows[0].shape[2]}: pictures must be "
                "of one size"
            )
    if not rows:
        raise DpfedError(f"the column {name} of {part} is empty")
    channels = max(len(row) for row in rows)
    same = [np.broadcast_to(row, (channels, *row.shape[1:])) for row in rows]
    return np.ascontiguousarray(np.stack(same))


def _channels_first(picture: Any) -> np.ndarray | None:
    """Return a picture as [channels, height, width], or None if the value is not a picture.

    If the first and the last axis could both be the channels, take the first axis as channels.
    """
    is_image = hasattr(picture, "convert")
    if is_image:
        picture = picture.convert("L" if picture.mode in ("L", "1") else "RGB")
    pixels = _array(picture)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or 0 in pixels.shape:
        return None
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.shape[0] in (1, 3) and not is_image:
        return pixels
    return np.moveaxis(pixels, -1, 0) if pixels.shape[-1] in (1, 3) else None

"""Read model inputs (texts, images, vectors) from columns in memory, told apart by column names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfed.data.cache import text_array
from dpfed.data.language import CHAT, TEXT, chats, forms_in, mixed, refuse_empty
from dpfed.data.memory_columns import EITHER, columns_of, has_columns, plain
from dpfed.data.tables import Kind
from dpfed.errors import DpfedError

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


def unlabelled_inputs(records: Any) -> tuple[dict[str, np.ndarray], Kind]:
    """Return the model's inputs of records without labels, by name, and the kind of the inputs.

    The kind is "text", "image" or "features".

    records  a data set, or its inputs alone: a list of texts or images, an array or a data frame
    """
    part = "records"
    known = (*TEXTS, *(first for first, _ in PAIRS), *IMAGES, *FEATURES, EITHER)
    if has_columns(records):
        columns = columns_of(records, part)
        if pick(columns, known) is None:
            columns = {FEATURES[0]: np.asarray(records)}
    elif _are_inputs(records):
        first = next(iter(records), None)
        columns = {TEXTS[0] if isinstance(first, str) else EITHER: plain(records)}
    else:
        columns = columns_of(records, part)
    inputs, kind, _ = inputs_of(columns, part)
    return inputs, kind


def _are_inputs(records: Any) -> bool:
    """Return True if the records are inputs alone, without labels or column names.

    Such records are a list or an array of texts, images or vectors.
    """
    if isinstance(records, list):
        return not records or not isinstance(records[0], Mapping | tuple)
    return hasattr(records, "dtype")


def array_of(values: Any) -> np.ndarray:
    """Return a column as an array; an array of shape () if its rows have different lengths.

    The callers refuse an array of shape () with an error.
    """
    try:
        array = np.asarray(values)
        rows_are_arrays = array.dtype == object and array.ndim == 1 and _is_row(array)
        return np.stack([np.asarray(plain(row)) for row in array]) if rows_are_arrays else array
    except ValueError:
        return np.empty((), dtype=object)


def _is_row(array: np.ndarray) -> bool:
    """Return True if the first element of a column is a list or an array, as in a data frame."""
    return len(array) > 0 and (isinstance(array[0], list) or getattr(array[0], "ndim", 0) > 0)


def pick(columns: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def inputs_of(
    columns: Mapping[str, Any], part: str
) -> tuple[dict[str, np.ndarray], Kind, set[str]]:
    """Return the model's inputs by name, their kind, and the names of the columns used for them.

    part  name of the data set in errors
    """
    form = language_form(columns, part)
    if form is not None:
        return _language_inputs(columns, form, part), "text", set(form)
    singles = [(name,) for name in TEXTS]
    texts = next((c for c in (*PAIRS, *singles) if all(name in columns for name in c)), None)
    if texts is not None:
        names = zip(("text", "text_pair"), texts, strict=False)
        inputs = {key: _strings(columns[name], name, part) for key, name in names}
        return inputs, "text", set(texts)
    picture = EITHER in columns and _is_picture(columns[EITHER])
    image = pick(columns, (*IMAGES, EITHER) if picture else IMAGES)
    if image is not None:
        return {"pixel_values": _pixels(columns[image], image, part)}, "image", {image}
    plain = pick(columns, (*FEATURES, EITHER))
    if plain is not None:
        return {"features": _features(columns[plain], plain, part)}, "features", {plain}
    raise DpfedError(
        f"{part} has no column that a model reads: call one {TEXTS[0]!r}, {CHAT[0]!r}, "
        f"{IMAGES[0]!r} or {FEATURES[0]!r}, or give a pair (X, y); it has: {', '.join(columns)}"
    )


def language_form(columns: Mapping[str, Any], part: str) -> tuple[str, ...] | None:
    """Return the names of the prompt and completion columns, or of the chat column.

    Return None if there is no such column. Raise DpfedError if there are columns of several forms,
    such as texts and chats.
    """
    forms = forms_in(columns)
    if len(forms) > 1:
        raise mixed(forms, part, "drop the other columns")
    return forms[0] if forms and forms[0] != TEXT else None


def _language_inputs(
    columns: Mapping[str, Any], form: tuple[str, ...], part: str
) -> dict[str, np.ndarray]:
    def place(i: int) -> str:
        return f"row {i} of {part}"

    if form == CHAT:
        (name,) = form
        return {name: chats(columns[name], place)}
    inputs = {name: _strings(columns[name], name, part) for name in form}
    for name, values in inputs.items():
        refuse_empty(values, name, place)
    return inputs


def _is_picture(values: Any) -> bool:
    """Return True for a column of images, judged by its first value.

    An image is a PIL image or a uint8 array with two or more axes. Other arrays are feature
    vectors, which a model gets unchanged.
    """
    first = next(iter(values), None)
    if hasattr(first, "convert"):
        return True
    pixels = array_of(first)
    return pixels.ndim >= 2 and pixels.dtype == np.uint8


def _strings(values: Any, name: str, part: str) -> np.ndarray:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise DpfedError(
                f"row {i} of the column {name} of {part} is no text but {type(value).__name__}"
            )
    return text_array(list(values))


def _features(column: Any, name: str, part: str) -> np.ndarray:
    values = array_of(column)
    if values.dtype.kind in "iufb":
        values = values.astype(np.float32)
    if values.ndim < 2 or values.dtype != np.float32 or not np.isfinite(values).all():
        raise DpfedError(
            f"the column {name} of {part} must be finite numbers, one row for each record"
        )
    return values


def _pixels(values: Any, name: str, part: str) -> np.ndarray:
    """Return a column of images `[n, channels, height, width]`: uint8 0 to 255, or float32 0 to 1.

    If any image has colour, grey images get three equal channels.
    """
    rows: list[np.ndarray] = []
    for i, picture in enumerate(values):
        place = f"row {i} of the column {name} of {part}"
        pixels = _channels_first(plain(picture))
        if pixels is None:
            raise DpfedError(
                f"{place} is no picture: give whole numbers from 0 to 255 (uint8) or decimal "
                "numbers from 0 to 1, with 1 or 3 channels"
            )
        rows.append(pixels)
        _refuse_unlike(pixels, rows[0], place)
    if not rows:
        raise DpfedError(f"the column {name} of {part} is empty")
    channels = max(len(row) for row in rows)
    expanded = [np.broadcast_to(row, (channels, *row.shape[1:])) for row in rows]
    return np.ascontiguousarray(np.stack(expanded))


def _refuse_unlike(pixels: np.ndarray, first: np.ndarray, place: str) -> None:
    """Raise DpfedError if an image differs in form from the first image, or has wrong values.

    All images of a column must have one size and one data type. Float pixels must be from 0 to 1.
    """
    if pixels.shape[1:] != first.shape[1:]:
        raise DpfedError(
            f"{place} has {pixels.shape[1]} x {pixels.shape[2]} pixels and row 0 has "
            f"{first.shape[1]} x {first.shape[2]}: pictures must be of one size"
        )
    if pixels.dtype != first.dtype:
        raise DpfedError(
            f"{place} has pixels of type {pixels.dtype} and row 0 of type {first.dtype}: "
            "pictures must be of one type"
        )
    if pixels.dtype == np.float32 and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise DpfedError(
            f"{place} has pixels outside 0 to 1: scale them, or call the column {FEATURES[0]!r} "
            "to give them to the model unchanged"
        )


def _channels_first(picture: Any) -> np.ndarray | None:
    """Return an image as an array [channels, height, width]; None if the value is no image.

    If the first and the last axis could both be the channels, take the first axis as channels.
    """
    is_image = hasattr(picture, "convert")
    if is_image:
        picture = picture.convert("L" if picture.mode in ("L", "1") else "RGB")
    pixels = array_of(picture)
    if pixels.dtype.kind == "f":
        pixels = pixels.astype(np.float32)
    if pixels.dtype not in (np.uint8, np.float32) or pixels.ndim not in (2, 3):
        return None
    if 0 in pixels.shape:
        return None
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.shape[0] in (1, 3) and not is_image:
        return pixels
    return np.moveaxis(pixels, -1, 0) if pixels.shape[-1] in (1, 3) else None

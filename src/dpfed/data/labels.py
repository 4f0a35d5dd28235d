"""Convert the labels of a user's table to class numbers, real numbers or sets of classes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfed.config import LabelTask
from dpfed.errors import DpfedError, phrase

MOST_CLASSES = 100_000
Classes = tuple[str, ...] | int | None


@dataclass(frozen=True)
class Column:
    """The label column of a table.

    values  label of each record, as the user gave it
    places  name of each record's place in the file, such as "line 7 of a.csv", for error messages
    """

    values: Sequence[Any]
    places: Sequence[str]


@dataclass(frozen=True)
class Encoded:
    """The labels of a training table and a test table, as arrays.

    parts     labels of the training table and of the test table, in the format of `Table.labels`
    names     names of the classes, in the order of their numbers; () without labels
    declared  True if the user declared the classes, so that they are public; False if they were
              taken from the private labels
    """

    parts: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    declared: bool


def no_labels(*records: int) -> Encoded:
    """Return placeholder labels (zeros) for tables that have none, and an empty list of classes.

    records  number of records of each table
    """
    return Encoded(tuple(np.zeros(n, dtype=np.int64) for n in records), (), declared=True)


def refuse_unlabelled(task: LabelTask, label: str) -> None:
    """Raise DpfedError if the task needs labels. Call this for a table without labels.

    label  name of the table, for the error
    """
    if task != "classify":
        raise DpfedError(f'{label} has no labels, and {phrase("task")} = "{task}" learns labels')


def encode_as(
    task: LabelTask, parts: Sequence[Column], classes: Classes, name: str = "label"
) -> Encoded:
    """Return the labels of the training and the test table in the form that the task needs.

    The forms are class numbers ("classify"), real numbers ("regress") or sets of classes
    ("multilabel").

    parts    label columns of both tables
    classes  class names or the number of classes, as in `encode`
    name     name of the label column
    """
    if task == "regress":
        if classes is not None:
            raise DpfedError(f"{phrase('classes')} has no effect with numbers: leave it out")
        return encode_numbers(parts, name)
    return encode_sets(parts, classes) if task == "multilabel" else encode(parts, classes)


def encode(parts: Sequence[Column], classes: Classes) -> Encoded:
    """Return the labels of the training and the test table as class numbers.

    parts    label columns of both tables
    classes  class names in the order of their numbers, or the number of classes; None for the
             classes that occur in the labels
    """
    texts = [[_text(v, where) for v, where in zip(p.values, p.places, strict=True)] for p in parts]
    if isinstance(classes, tuple):
        numbers = numbers_of(classes, phrase("classes"))
        # If no class name is itself a number, the user's labels may also be the positions 0, 1, 2,
        # ... of class names.
        if not any(map(_is_number, classes)):
            numbers |= {str(i): i for i in range(len(classes))}
        shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        allowed = f"one of {phrase('classes')} ({shown})"
        return Encoded(_look_up(parts, texts, numbers, allowed), classes, True)
    different = {t for part in texts for t in part}
    if classes is None and not all(map(_is_number, different)):
        _refuse_many(len(different))
        names = tuple(sorted(different))
        allowed = "known"
    else:
        count = classes if classes is not None else 1 + max(map(int, different), default=0)
        _refuse_many(count)
        names = tuple(str(i) for i in range(max(count, 2)))
        allowed = f"a whole number from 0 to {count - 1}"
    numbers = {name: i for i, name in enumerate(names)}
    return Encoded(_look_up(parts, texts, numbers, allowed), names, classes is not None)


def _refuse_many(count: int) -> None:
    if count > MOST_CLASSES:
        raise DpfedError(
            f"the labels show {count:,} classes: number them 0, 1, 2, ... or set data.label to "
            "another column"
        )


def numbers_of(classes: Sequence[str], key: str) -> dict[str, int]:
    """Return the number of each class name that the user declared: its position in `classes`.

    Raise DpfedError for a repeated name or a single class. `key` names the setting in the error.
    """
    numbers = {name: i for i, name in enumerate(classes)}
    if len(numbers) != len(classes) or len(classes) < 2:
        raise DpfedError(f"{key} = {list(classes)} must name at least two classes, each once")
    return numbers


def _look_up(
    parts: Sequence[Column], texts: list[list[str]], numbers: dict[str, int], allowed: str
) -> tuple[np.ndarray, ...]:
    out = []
    for part, column in zip(parts, texts, strict=True):
        found = np.array([numbers.get(text, -1) for text in column], dtype=np.int64)
        bad = np.flatnonzero(found < 0)
        if len(bad):
            raise DpfedError(
                f"{part.places[bad[0]]} has label {column[bad[0]][:80]!r}; it must be {allowed}"
            )
        out.append(found)
    return tuple(out)


def _is_number(text: str) -> bool:
    """Return True for a whole number without sign or leading zeros that fits in 64 bits."""
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0") and len(text) < 19


def _text(value: Any, place: str) -> str:
    """Return a label as a string; 1, 1.0, true and "1" all give the string "1".

    place  name of the record in the error for a missing or unusable label
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool | int):
        return str(int(value))
    if value in (None, ""):
        raise DpfedError(f"{place} has no label")
    if not isinstance(value, str) or not value.strip():
        raise DpfedError(f"{place} has no usable label: {value!r:.80}")
    return value.strip()


def encode_numbers(parts: Sequence[Column], name: str) -> Encoded:
    """Return the labels of the training and the test table as float64 numbers, for regression.

    name  name of the label column
    """
    found = []
    for part in parts:
        numbers = [_number(v, where) for v, where in zip(part.values, part.places, strict=True)]
        found.append(np.array(numbers, dtype=np.float64))
    return Encoded(tuple(found), (name,), declared=True)


def _number(value: Any, place: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    # Refuse a label that float32 cannot hold, because the loss is computed in float32.
    if not abs(number) < float(np.finfo(np.float32).max):
        raise DpfedError(f"{place} has label {value!r:.80}; it must be a finite number")
    return number


def encode_sets(parts: Sequence[Column], classes: Classes) -> Encoded:
    """Return the labels of the training and the test table as sets of classes, for "multilabel".

    The arrays are uint8 `[n, classes]`: 1 for each class of a record, else 0. A user's label has
    one of three forms:
    - a list of class names, or a string with this list in JSON
    - class names separated by semicolons
    - a list with one 0 or 1 for each class, or a string with this list in JSON

    classes  class names or the number of classes, as in `encode`
    """
    cells = [[_cell(v, where) for v, where in zip(p.values, p.places, strict=True)] for p in parts]
    used = [value for part in cells for cell in part for value in cell]
    named = any(isinstance(value, str) for value in used)
    if not named and used:
        return _flag_vectors(parts, cells, classes)
    if isinstance(classes, int):
        raise DpfedError(
            f"{phrase('classes')} = {classes} is a number, and the labels are names: list the names"
        )
    names = classes or tuple(sorted(set(map(str, used))))
    _refuse_many(len(names))
    numbers = numbers_of(names, phrase("classes"))
    tables = []
    for part, column in zip(parts, cells, strict=True):
        flags = np.zeros((len(column), len(names)), dtype=np.uint8)
        for row, cell in enumerate(column):
            for value in cell:
                if value not in numbers:
                    raise DpfedError(
                        f"{part.places[row]} has label {value!r:.80}; its labels must be among "
                        f"{phrase('classes')} ({', '.join(names[:10])})"
                    )
                flags[row, numbers[value]] = 1
        tables.append(flags)
    return Encoded(tuple(tables), tuple(names), classes is not None)


def _flag_vectors(
    parts: Sequence[Column], cells: list[list[list[Any]]], classes: Classes
) -> Encoded:
    """Return sets of classes from labels that are lists with one 0 or 1 for each class.

    The number of classes is treated as public, because it is the length of each list.
    """
    width = len(cells[0][0])
    names = classes if isinstance(classes, tuple) else tuple(map(str, range(width)))
    declared = len(classes) if isinstance(classes, tuple) else classes
    if declared not in (None, width):
        raise DpfedError(
            f"{parts[0].places[0]} has {width} labels, and {phrase('classes')} says otherwise"
        )
    tables = []
    for part, column in zip(parts, cells, strict=True):
        for place, cell in zip(part.places, column, strict=True):
            if len(cell) != width or not all(value in (0, 1) for value in cell):
                raise DpfedError(
                    f"{place} has labels {cell!r:.80}; give {width} numbers 0 or 1, or a list of "
                    "class names"
                )
        tables.append(np.array(column, dtype=np.uint8).reshape(len(column), width))
    return Encoded(tuple(tables), names, declared=True)


def _cell(value: Any, place: str) -> list[Any]:
    """Return the label of one record as a list: class names, or one 0 or 1 for each class.

    place  name of the record in errors
    """
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("["):
            return [name.strip() for name in text.split(";") if name.strip()]
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise DpfedError(f"{place} has labels that are not JSON: {text!r:.80}") from None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple | set | frozenset):
        raise DpfedError(
            f"{place} has label {value!r:.80}; it must be a list of class names, or of 0 and 1"
        )
    return sorted(value) if isinstance(value, set | frozenset) else list(value)


def stated_names(data: Any, label: str | None) -> tuple[str, ...]:
    """Return the class names that a Hugging Face dataset stores for its label column; () if none.

    data   the dataset, or any other object, which has no class names
    label  name of the label column
    """
    features = getattr(data, "features", None)
    feature = features.get(label) if isinstance(features, Mapping) else None
    classes = getattr(feature, "feature", feature)
    return tuple(map(str, getattr(classes, "names", None) or ()))


def with_names(column: Column, names: Sequence[str]) -> Column:
    """Return a label column of lists of class numbers with each number replaced by its class name.

    names  class names in the order of their numbers
    """
    values = []
    for cell, place in zip(column.values, column.places, strict=True):
        try:
            values.append([names[number] for number in cell])
        except (TypeError, IndexError):
            raise DpfedError(
                f"{place} has labels {cell!r:.80}; give class numbers from 0 to {len(names) - 1}"
            ) from None
    return Column(values, column.places)

"""Turn the labels of a user's table (names or numbers) into class numbers 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfed.errors import DpfedError, phrase

MOST_CLASSES = 100_000
Classes = tuple[str, ...] | int | None


@dataclass(frozen=True)
class Column:
    """The label of each record, and the record's position in the file for error messages."""

    values: Sequence[Any]
    places: Sequence[str]


@dataclass(frozen=True)
class Encoded:
    """Labels as class numbers.

    parts     class numbers `[n]` of the training table, then of the test table
    names     names of the classes, in the order of their numbers; () without labels
    declared  True if the user declared the classes, False if they were taken from the labels
    """

    parts: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    declared: bool


def no_labels(*records: int) -> Encoded:
    """Return the labels of tables without labels: zeros, and no classes.

    records  number of records of each table
    """
    return Encoded(tuple(np.zeros(n, dtype=np.int64) for n in records), (), declared=True)


def encode(parts: Sequence[Column], classes: Classes) -> Encoded:
    """Return the labels of both tables (training, test) as class numbers.

    classes  class names in the order of their numbers, or the number of classes; None for the
             classes that occur in the labels
    """
    texts = [[_text(v, where) for v, where in zip(p.values, p.places, strict=True)] for p in parts]
    if isinstance(classes, tuple):
        numbers = numbers_of(classes, phrase("classes"))
        # If no class name is itself a number, the labels may also be the numbers of the classes.
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
    """Return the number of each declared class, by name.

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
    """Return a label as text; 1, 1.0, true and "1" give the same text. `place` is for errors."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool | int):
        return str(int(value))
    if value in (None, ""):
        raise DpfedError(f"{place} has no label")
    if not isinstance(value, str) or not value.strip():
        raise DpfedError(f"{place} has no usable label: {value!r:.80}")
    return value.strip()

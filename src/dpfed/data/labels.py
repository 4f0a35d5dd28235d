"""Labels as a user's table has them, names or numbers, as class numbers 0, 1, 2, ..."""

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
    """The label of each record, and the words that name a record when something is wrong with it."""

    values: Sequence[Any]
    places: Sequence[str]


@dataclass(frozen=True)
class Encoded:
    parts: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    declared: bool


def encode(parts: Sequence[Column], classes: Classes) -> Encoded:
    """Class numbers of all parts (training, test).

    classes  the names, in the order of their numbers; or how many there are, numbered from 0; or None: read off the labels
    """
    texts = [[_text(v, where) for v, where in zip(p.values, p.places, strict=True)] for p in parts]
    if isinstance(classes, tuple):
        if len(set(classes)) != len(classes) or len(classes) < 2:
            raise DpfedError(
                f"{phrase('classes')} = {list(classes)} must name at least two classes, each once"
            )
        number = {name: i for i, name in enumerate(classes)}
        if not any(map(_whole, classes)):  # a table may hold the numbers of the named classes
            number |= {str(i): i for i in range(len(classes))}
        shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        allowed = f"one of {phrase('classes')} ({shown})"
        return Encoded(_look_up(parts, texts, number, allowed), classes, True)
    if classes is None and not all(_whole(t) for part in texts for t in part):
        names = tuple(sorted({t for part in texts for t in part}))
        _not_too_many(len(names))
        return Encoded(
            _look_up(parts, texts, {n: i for i, n in enumerate(names)}, "known"), names, False
        )
    count = (
        classes
        if classes is not None
        else 1 + max((int(t) for part in texts for t in part), default=0)
    )
    _not_too_many(count)
    names = tuple(str(i) for i in range(max(count, 2)))
    number = {name: i for i, name in enumerate(names)}
    return Encoded(
        _look_up(parts, texts, number, f"a whole number from 0 to {count - 1}"),
        names,
        declared=classes is not None,
    )


def _not_too_many(count: int) -> None:
    if count > MOST_CLASSES:
        raise DpfedError(
            f"the labels show {count:,} classes: number them 0, 1, 2, ... or set data.label to another column"
        )


def _look_up(
    parts: Sequence[Column], texts: list[list[str]], number: dict[str, int], allowed: str
) -> tuple[np.ndarray, ...]:
    out = []
    for part, column in zip(parts, texts, strict=True):
        found = np.array([number.get(text, -1) for text in column], dtype=np.int64)
        bad = np.flatnonzero(found < 0)
        if len(bad):
            raise DpfedError(
                f"{part.places[bad[0]]} has label {column[bad[0]][:80]!r}; it must be {allowed}"
            )
        out.append(found)
    return tuple(out)


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0") and len(text) < 19


def _text(value: Any, place: str) -> str:
    """One spelling for 1, 1.0, true and "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool | int):
        return str(int(value))
    if not isinstance(value, str) or not value.strip():
        raise DpfedError(
            f"{place} has no label"
            if value in (None, "")
            else f"{place} has no usable label: {value!r:.80}"
        )
    return value.strip()

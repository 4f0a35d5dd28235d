"""Read the columns of data sets that a program holds in memory, in any of several common forms.

These forms are data sets:
- a dictionary of columns, a data frame, or a Hugging Face dataset
- a pair `(X, y)` of inputs and labels; X is an array, a list of texts or images, or a data frame
- a torch `Dataset` whose items are pairs `(x, y)` or dictionaries
- a list of records, which are pairs `(x, y)`, dictionaries, or texts for a language model
A list or a dictionary of data sets has one data set for each client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dpfed.errors import DpfedError

LABELS = ("label", "labels", "y")
# A column of this name holds images if its first value is an image, else feature vectors.
EITHER = "x"
TEXT = "text"
PROMPT = "prompt"
CHAT = "messages"
# Names of the parts of a published data set.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "unsupervised")
WAYS = (
    "a dictionary of columns, a data frame, a dataset, a list of dictionaries or of texts, "
    "a pair (X, y) of arrays or a torch Dataset"
)


def client_data(data: Any) -> dict[str, Any]:
    """Return the data set of each client by name; {} if `data` is a single data set."""
    if isinstance(data, Mapping):
        named = {str(name): value for name, value in data.items()}
        if set(named) & set(LABELS) or not all(map(_is_data_set, named.values())):
            return {}
        if named and set(named) <= set(SPLITS):
            raise DpfedError(
                f"train has the splits {', '.join(named)}, which are no clients: give one of them, "
                f"such as data[{next(iter(named))!r}]"
            )
        return named
    # A list is a list of clients if its first element is no record. A tuple is always a pair `(X,
    # y)`.
    if not isinstance(data, list) or not data or _is_record(data[0]):
        return {}
    others = [i for i, value in enumerate(data) if not _is_data_set(value)]
    if others and len(others) < len(data):
        raise DpfedError(
            f"client {others[0]} of the list has {type(data[others[0]]).__name__}, and others have "
            "a data set: give every client a data set, such as a pair (X, y)"
        )
    if others:
        return {}
    width = len(str(len(data) - 1))
    return {f"client {i:0{width}}": value for i, value in enumerate(data)}


def columns_of(data: Any, part: str) -> dict[str, Any]:
    """Return the columns of one data set by name; `part` names the data set in errors."""
    if isinstance(data, Mapping):
        return {str(name): values for name, values in data.items()}
    if has_columns(data):
        return {str(name): data[name] for name in _column_names(data)}
    if isinstance(data, list) and data and _is_record(data[0]):
        return _from_items(data, part)
    if isinstance(data, list) and data and all(isinstance(text, str) for text in data):
        return {TEXT: data}
    if isinstance(data, tuple) and len(data) == 2:
        return {**_inputs_column(data[0]), "label": plain(data[1])}
    if _is_map_style(data):
        return _from_items((data[i] for i in range(len(data))), part)
    raise DpfedError(f"{part} must be {WAYS}, not {type(data).__name__}{_advice(data)}")


def has_columns(data: Any) -> bool:
    """Return True for a data frame or a Hugging Face dataset."""
    return not isinstance(data, Mapping) and bool(_column_names(data))


def plain(values: Any) -> Any:
    """Return a torch tensor as a NumPy array, and any other value unchanged."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


def joined(parts: Sequence[Any]) -> Any:
    """Join the values that several data sets have for one column, in the order of the data sets."""
    if all(has_columns(part) for part in parts):
        import pandas

        return pandas.concat(parts)
    arrays = [plain(part) for part in parts]
    if all(isinstance(array, np.ndarray) and array.ndim > 1 for array in arrays):
        shapes = {(array.shape[1:], array.dtype) for array in arrays}
        if len(shapes) == 1:
            return np.concatenate(arrays)
    return [value for array in arrays for value in _listed(array)]


def _listed(values: Any) -> list[Any]:
    """Return a column of the user's data as a list; NumPy numbers become Python numbers."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        listed: list[Any] = values.tolist()
        return listed
    return list(values)


def _column_names(data: Any) -> list[Any]:
    names = getattr(data, "column_names", None)
    return list(getattr(data, "columns", ()) if names is None else names)


def _is_data_set(value: Any) -> bool:
    if isinstance(value, Mapping) or has_columns(value):
        return True
    if isinstance(value, tuple):
        return len(value) == 2 and not _is_single(value[1])
    if isinstance(value, list):
        return bool(value) and _is_record(value[0])
    return _is_map_style(value)


def _is_record(value: Any) -> bool:
    """Return True if the value is one record, not a data set: a pair `(x, y)` or a dictionary.

    A pair is a record if y is a single label or x a single text. A dictionary is a record if it has
    a single label, text, prompt or chat, and not a column of them.
    """
    if isinstance(value, tuple) and len(value) == 2:
        return isinstance(value[0], str) or _is_single(value[1])
    if not isinstance(value, Mapping):
        return False
    if _is_chat(value.get(CHAT)):
        return True
    return any(_is_single(value[name]) for name in (*LABELS, TEXT, PROMPT) if name in value)


def _is_chat(value: Any) -> bool:
    """Return True for a single chat, a list of messages. A column of chats is a list of chats."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _is_single(value: Any) -> bool:
    """Return True for a single text or number, of Python, NumPy or torch; False for a column."""
    return isinstance(value, str | int | float | np.generic) or getattr(value, "ndim", 1) == 0


def _is_map_style(data: Any) -> bool:
    """Return True for a torch `Dataset`, or another object with a length and numbered items."""
    # Arrays, tensors and pandas series also have numbered items, but they are columns, not data
    # sets. Their attribute `dtype` tells them apart.
    if isinstance(data, str | list | tuple) or hasattr(data, "dtype"):
        return False
    return _length(data) is not None and callable(getattr(data, "__getitem__", None))


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def _inputs_column(inputs: Any) -> dict[str, Any]:
    """Return the inputs X of a pair `(X, y)` as one column, whose name tells what it holds.

    The column holds texts, images or feature vectors.
    """
    if has_columns(inputs):
        return {"features": np.asarray(inputs)}
    first = next(iter(inputs), None) if isinstance(inputs, Iterable) else None
    return {TEXT if isinstance(first, str) else EITHER: plain(inputs)}


def _from_items(items: Iterable[Any], part: str) -> dict[str, Any]:
    """Return the columns of a list of records, which are dictionaries or pairs (input, label).

    part  name of the data set in errors
    """
    rows = []
    for i, item in enumerate(items):
        if isinstance(item, Mapping):
            rows.append({str(name): plain(value) for name, value in item.items()})
        elif isinstance(item, list | tuple) and len(item) == 2:
            rows.append({EITHER: plain(item[0]), "label": plain(item[1])})
        else:
            raise DpfedError(
                f"record {i} of {part} is {type(item).__name__}: give pairs (x, y) or dictionaries"
            )
        if rows[i].keys() != rows[0].keys():
            raise DpfedError(
                f"record {i} of {part} has {', '.join(rows[i])} and record 0 has "
                f"{', '.join(rows[0])}"
            )
    if not rows:
        raise DpfedError(f"{part} has no records")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if EITHER in columns and isinstance(columns[EITHER][0], str):
        columns[TEXT] = columns.pop(EITHER)
    return columns


def _advice(data: Any) -> str:
    """Return the end of an error message for unusable data: a remedy for a DataLoader, else ""."""
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        return ": give its .dataset, because batches are drawn at random here"
    if isinstance(data, list) and data and _is_chat(data[0]):
        return f' of chats: give {{"{CHAT}": chats}}'
    return ""

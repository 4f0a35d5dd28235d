"""The data source "given": data in memory that a program passes to `dpfed.fine_tune`.

The name of a column tells what it holds: labels, texts, images or feature vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpfed.config import DataSection, LabelTask
from dpfed.data.columns import is_missing
from dpfed.data.labels import (
    Column,
    Encoded,
    encode,
    encode_as,
    no_labels,
    stated_names,
    with_names,
)
from dpfed.data.language import forms_in, refuse_half
from dpfed.data.memory_columns import LABELS, client_data, columns_of, has_columns, joined, plain
from dpfed.data.memory_inputs import array_of, inputs_of, pick
from dpfed.data.tables import Kind, Source, Table
from dpfed.errors import DpfedError, phrase

# Name of the added column that names each record's client, if the user gave one data set per
# client.
CLIENT = "client"
_given_source: ContextVar[Source | None] = ContextVar("given_source", default=None)


@contextmanager
def given_source(source: Source) -> Iterator[None]:
    """Within this context, let the configuration `data.name = "given"` load this source."""
    token = _given_source.set(source)
    try:
        yield
    finally:
        _given_source.reset(token)


@dataclass(frozen=True)
class InMemory(DataSection):
    tasks = ("classify", "regress", "multilabel")

    name: str = "given"

    def load(self, task: LabelTask = "classify") -> Source:
        source = _given_source.get()
        if source is not None:
            return source
        raise DpfedError(
            "this run's data were handed over by a program, so only that program can give them "
            "again: call dpfed.fine_tune there, or put them into files and use another data.name"
        )


@dataclass(frozen=True)
class _Given:
    """The columns of one data set that the user gave, and facts about them.

    part         "train" or "test", for errors
    class_names  class names that the data set states for its label column; () if none
    clients      names of the clients, if the user gave a separate data set for each; else ()
    """

    columns: Mapping[str, Any]
    part: str
    class_names: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()


def source_of(
    train: Any,
    test: Any,
    classes: Sequence[str] | int | None = None,
    task: LabelTask | None = "classify",
) -> Source:
    """Return a source from the user's training and test data, which must have the same columns.

    train    private records: one data set, or one for each client in a list or a dictionary
    test     public records
    classes  names of the classes in the order of their numbers, or the number of classes;
             None for the classes that occur in the data
    task     meaning of a label: a class, a number or a set of classes; None for a set of classes
             if labels are lists of names, else a class
    """
    if train is test:
        raise DpfedError("test is train: the test set is public and must be other records")
    private, public = _given(train, "train"), _given(test, "test")
    task = task or ("multilabel" if _has_lists_of_names(private) else "classify")
    labels = _labels(private, public, classes, task)
    first, kind = _table(private, labels.parts[0])
    second, other = _table(public, labels.parts[1])
    if kind != other or first.inputs.keys() != second.inputs.keys():
        names = [" and ".join(table.inputs) for table in (first, second)]
        raise DpfedError(
            f"a record of train has {names[0]} and one of test has {names[1]}: "
            "give both the same columns"
        )
    for name, x in first.inputs.items():
        _refuse_unlike(x, second.inputs[name])
    white = 255.0
    if kind == "image" and first.inputs["pixel_values"].dtype == np.float32:
        white = 1.0
    return Source(
        first,
        second,
        labels.names,
        kind,
        white=white,
        declared=labels.declared,
        clients=private.clients,
        task=task,
    )


def _refuse_unlike(train: np.ndarray, test: np.ndarray) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise DpfedError(
            f"a record of train has shape {train.shape[1:]} and one of test {test.shape[1:]}"
        )
    if train.dtype != test.dtype:
        raise DpfedError(
            f"train has values of type {train.dtype} and test of type {test.dtype}: "
            "give both the same type"
        )


def _given(data: Any, part: str) -> _Given:
    """Return the columns of the user's data. Data sets of several clients become one table.

    part  "train" or "test", for errors
    """
    clients = client_data(data)
    if not clients:
        columns = columns_of(data, part)
        return _Given(columns, part, stated_names(data, pick(columns, LABELS)))
    if part == "test":
        raise DpfedError(
            "test has one data set for each client: the test set is the server's, so give one"
        )
    tables = {name: columns_of(value, f"train[{name!r}]") for name, value in clients.items()}
    first, *_ = tables.values()
    label = pick(first, LABELS) or next(iter(first))
    for name, table in tables.items():
        if len(next(iter(table.values()))) == 0:
            raise DpfedError(f"train[{name!r}] has no records: leave this client out")
        if table.keys() != first.keys():
            raise DpfedError(
                f"train[{name!r}] has the columns {', '.join(table)}, and the first client has "
                f"{', '.join(first)}: give every client the same columns"
            )
    for key in first:
        _refuse_other_shapes({name: table[key] for name, table in tables.items()}, key)
    columns = {key: joined([table[key] for table in tables.values()]) for key in first}
    owners = [name for name, table in tables.items() for _ in range(len(table[label]))]
    columns[CLIENT] = np.array(owners)
    stated = {stated_names(value, label) for value in clients.values()}
    names = stated.pop() if len(stated) == 1 else ()
    return _Given(columns, part, names, tuple(clients))


def _refuse_other_shapes(values: Mapping[str, Any], column: str) -> None:
    """Raise DpfedError if the arrays of the clients have records of different shapes."""
    shapes = {name: np.shape(part)[1:] for name, part in values.items() if hasattr(part, "shape")}
    for name, shape in shapes.items():
        first = next(iter(shapes))
        if shape != shapes[first]:
            raise DpfedError(
                f"{column} of a record of train[{name!r}] has shape {shape}, and of "
                f"train[{first!r}] {shapes[first]}: give every client records of one shape"
            )


def _labels(
    train: _Given, test: _Given, classes: Sequence[str] | int | None, task: LabelTask
) -> Encoded:
    """Return the labels of the training and the test table, in the form that `task` needs.

    The forms are class numbers ("classify"), real numbers ("regress") or sets of classes
    ("multilabel").
    """
    if task != "classify":
        return _other_labels(train, test, classes, task)
    if classes is None and _has_no_labels(train):
        return no_labels(*(_rows(given) for given in (train, test)))
    parts = [_label_column(given) for given in (train, test)]
    columns = [column for column, _ in parts]
    if classes is not None:
        return encode(columns, _declared(classes))
    stated = train.class_names
    if stated and all(isinstance(value, int) for column in columns for value in column.values):
        # A Hugging Face dataset with named classes stores a label as a position in its list of
        # names, so these labels are class numbers already.
        return replace(encode(columns, len(stated)), names=stated)
    if stated:
        return encode(columns, stated)
    categories = parts[0][1]
    if len(categories) > 1 and categories == parts[1][1]:
        # pandas takes the categories of a column from the labels. The labels are private, so the
        # list of classes is private too.
        return replace(encode(columns, categories), declared=False)
    for column in columns:
        _refuse_negative(column)
    return encode(columns, None)


def _other_labels(
    train: _Given, test: _Given, classes: Sequence[str] | int | None, task: LabelTask
) -> Encoded:
    """Return the labels of the training and the test table for "regress" and "multilabel"."""
    declared = None if classes is None else _declared(classes)
    columns = []
    for given in (train, test):
        label = _label_name(given)
        values = given.columns[label]
        if has_columns(values):
            # For "multilabel", labels may be a data frame of 0 and 1. Its column names are the
            # class names.
            declared = declared or tuple(map(str, values.columns))
            values = np.asarray(values)
        values = plain(values)
        rows = values.tolist() if hasattr(values, "tolist") else list(values)
        if task == "regress":
            rows = [_only(row) for row in rows]
        columns.append(Column(rows, [f"row {i} of {given.part}" for i in range(len(rows))]))
        if not rows:
            raise DpfedError(f"the column {label} of {given.part} is empty")
    if task == "multilabel" and train.class_names:
        columns = [with_names(column, train.class_names) for column in columns]
        declared = declared or train.class_names
    return encode_as(task, columns, declared, _label_name(train))


def _only(value: Any) -> Any:
    """Return the number from a list of one number, and any other value unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _has_lists_of_names(given: _Given) -> bool:
    """Return True if the label of each record is a list of class names."""
    label = pick(given.columns, LABELS)
    if label is None or has_columns(given.columns[label]):
        return False
    rows = list(given.columns[label])
    if not all(isinstance(row, list | tuple | set | frozenset) for row in rows):
        return False
    names = [name for row in rows for name in row]
    return bool(names) and all(isinstance(name, str) for name in names)


def _has_no_labels(given: _Given) -> bool:
    """Return True for language data without a label column."""
    return pick(given.columns, LABELS) is None and bool(forms_in(given.columns))


def _rows(given: _Given) -> int:
    """Return the number of records of language data. Raise DpfedError for data of other kinds."""
    forms = forms_in(given.columns)
    if not forms:
        inputs_of(given.columns, given.part)
    return len(given.columns[forms[0][0]])


def _declared(classes: Sequence[str] | int) -> tuple[str, ...] | int:
    if isinstance(classes, int):
        if classes < 2:
            raise DpfedError(f"classes = {classes} must be at least 2")
        return classes
    if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray):
        raise DpfedError(f"classes must be a list of names or their number, not {classes!r:.60}")
    return tuple(map(str, classes))


def _label_column(given: _Given) -> tuple[Column, tuple[str, ...]]:
    """Return the label column of a table, and the ordered categories of a categorical column.

    The categories are () if the column is not categorical.
    """
    columns, part = given.columns, given.part
    label = _label_name(given)
    labels = array_of(columns[label])
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) == 0 or isinstance(labels[0], list | set | np.ndarray):
        raise DpfedError(
            f"the column {label} of {part} must be a non-empty list with one label for each "
            f'record; with several labels for a record, set {phrase("task")} = "multilabel"'
        )
    if labels.dtype.kind == "f" and (labels % 1 > 0).any():
        raise DpfedError(
            f"the column {label} of {part} has numbers such as {labels[labels % 1 > 0][0]:g}, "
            f'which are no classes: set {phrase("task")} = "regress" to predict them'
        )
    places = [f"row {i} of {part}" for i in range(len(labels))]
    values = [None if is_missing(value) else value for value in labels.tolist()]
    # Only pandas has categorical columns.
    categories = getattr(getattr(columns[label], "dtype", None), "categories", None)
    return Column(values, places), tuple(map(str, () if categories is None else categories))


def _label_name(given: _Given) -> str:
    """Return the name of the column with the labels."""
    label = pick(given.columns, LABELS)
    if label is None:
        have = ", ".join(given.columns)
        refuse_half(given.columns, given.part)
        raise DpfedError(f"{given.part} has no column called {' or '.join(LABELS)}; it has: {have}")
    return label


def _refuse_negative(column: Column) -> None:
    for value, place in zip(column.values, column.places, strict=True):
        if isinstance(value, int | float) and value < 0:
            raise DpfedError(
                f"{place} has label {value}: number the classes 0, 1, 2, ..., "
                "or name every label in classes"
            )


def _table(given: _Given, labels: np.ndarray) -> tuple[Table, Kind]:
    columns, part = given.columns, given.part
    inputs, kind, used = inputs_of(columns, part)
    for name, values in inputs.items():
        if len(values) != len(labels):
            raise DpfedError(f"{part} has {len(labels)} records and {len(values)} of {name}")
    used |= {str(pick(columns, LABELS))}
    rest = {
        name: array_of(values)
        for name, values in columns.items()
        if name not in used and _names_clients(values)
    }
    flat = {name: values for name, values in rest.items() if values.shape == labels.shape}
    return Table(inputs, labels, flat), kind


def _names_clients(values: Any) -> bool:
    """Return True if a column can name clients or units: its first value is a text or a number.

    Other columns are not read, because they may be large.
    """
    kinds = str | int | float | np.generic | None
    return len(values) > 0 and isinstance(next(iter(values)), kinds)

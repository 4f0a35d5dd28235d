"""Read a user's table in CSV, TSV, JSON lines or Parquet. Errors name the wrong row."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.data.cache import text_array
from dpfed.data.files import lines_of, read_bytes, reading
from dpfed.data.language import chats, refuse_empty
from dpfed.errors import DpfedError, reason

LONGEST_FIELD = 1 << 27
LONGEST_HEADER = 1 << 16
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


@dataclass(frozen=True)
class Columns:
    """The columns of a table, all of the same length.

    label      name of the table in error messages, usually its path
    values     the values of each column, by the name of the column
    rows       number of each row, for error messages: its line in the file, or its position
    unit       "line" if `rows` holds line numbers, "row" if it holds positions
    separator  name of the character between the columns of a CSV file
    """

    label: str
    values: dict[str, list[Any]]
    rows: list[int]
    unit: str = "line"
    separator: str = "comma"

    def place(self, i: int) -> str:
        return f"{self.unit} {self.rows[i]} of {self.label}"

    def places(self) -> list[str]:
        return [self.place(i) for i in range(len(self.rows))]

    def get(self, name: str, key: str) -> list[Any]:
        if name not in self.values:
            have = ", ".join(map(str, list(self.values)[:20]))
            raise DpfedError(
                f"{self.label} has no column {name!r}: set {key} to one of {have or 'its columns'}"
            )
        return self.values[name]

    def language_inputs(self, names: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Return the model's inputs by name: texts, pairs of texts, completions or chats.

        names  column of each input, such as {"prompt": "question", "completion": "answer"}
        """
        if "messages" in names:
            column = self.get(names["messages"], "data.messages")
            return {"messages": chats(column, self.place)}
        return {name: self._texts(column, f"data.{name}") for name, column in names.items()}

    def _texts(self, name: str, key: str) -> np.ndarray:
        """Return the column `name` of texts as an array. Raise DpfedError for an empty text.

        key  setting that chose this column, for the error

        An empty text is refused, because a model learns nothing useful from it.
        """
        column = self.get(name, key)
        for i, text in enumerate(column):
            if not isinstance(text, str | None):
                raise DpfedError(
                    f"{self.place(i)} has {text!r:.60}, not a text, in column {name!r}: "
                    "mend or drop that row"
                )
        refuse_empty((text or "" for text in column), name, self.place)
        return text_array(column)

    def other_columns(
        self, used: set[str | None], client: str | None, unit: str | None
    ) -> dict[str, np.ndarray]:
        """Return the columns that can name clients or units: all columns except those in `used`.

        The columns `client` and `unit` are always among them. A unit is what privacy protects: one
        record, or all records of one person.

        used    names of the columns that a model input or the labels use
        client  name of the column that names each record's client, or None
        unit    name of the column that names each record's unit, or None

        Columns with missing values, or with values of different types, are left out. Raise
        DpfedError if the column `client` or `unit` has such values.
        """
        columns = {}
        for name, values in self.values.items():
            array = plain_column(values) if name not in used else None
            if array is not None:
                columns[name] = array
        for key, wanted in (("data.client_column", client), ("data.unit_column", unit)):
            if wanted is not None:
                columns[wanted] = self._key_column(wanted, key)
        return columns

    def _key_column(self, name: str, key: str) -> np.ndarray:
        """Return a column of client or unit names; `key` is the setting that needs it, for errors.

        Raise DpfedError for missing values and for texts mixed with numbers.
        """
        column = self.get(name, key)
        for i, value in enumerate(column):
            if value == "" or is_missing(value):
                raise DpfedError(
                    f"{self.place(i)} has no value in column {name!r}, which {key} needs"
                )
        array = plain_column(column)
        if array is None:
            raise DpfedError(
                f"column {name!r} of {self.label} must hold texts or numbers, not both, for {key}"
            )
        return array


def is_missing(value: Any) -> bool:
    """Return True for None, NaN, and the missing values NA and NaT of pandas.

    The values of pandas are recognized by the name of their class, because a comparison with NA
    gives neither True nor False.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def plain_column(column: list[Any]) -> np.ndarray | None:
    """Return the column as an array of strings, integers or floats, which can be sorted.

    Return None if values are missing or their types cannot be sorted together.
    """
    if all(isinstance(v, str) for v in column):
        return text_array(column)
    if all(isinstance(v, bool | int) and abs(v) < 2**63 for v in column):
        return np.array(column, dtype=np.int64)
    if all(isinstance(v, int | float) for v in column):
        return np.array(column, dtype=np.float64)
    return None


def read_columns(path: Path) -> Columns:
    """Return the table in a file; the suffix of the file name, such as .csv, selects the reader.

    Raise DpfedError if the table has no rows.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DpfedError(f"{path} must end in {', '.join(READERS)}")
    if not path.is_file():
        raise DpfedError(
            f"there is no file {path}: set data.path and data.test_path to your tables"
        )
    table = reader(path)
    if not table.rows:
        raise DpfedError(f"{path} has no rows")
    return table


def read_csv(path: Path) -> Columns:
    """Return the table in a CSV file, also as spreadsheet programs write it.

    Columns are separated by commas, semicolons or tabs, and quoted by double quotes.
    """
    # `lines_of` checks that each line is UTF-8 and names a wrong line in its error.
    text = "\n".join(lines_of(read_bytes(path), str(path)))
    delimiter = _delimiter(text)
    previous = csv.field_size_limit(LONGEST_FIELD)
    try:
        table = _from_rows(path, _csv_rows(text, delimiter, path))
    finally:
        csv.field_size_limit(previous)
    return replace(table, separator=SEPARATORS[delimiter])


def _delimiter(text: str) -> str:
    """Return the separator of a CSV text: the one that splits the first line into the most columns.

    Only the keys of `SEPARATORS` are tried. If several of them give equally many columns, return
    the first of these.
    """
    start = text[:LONGEST_HEADER]

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(start, newline="\n"), delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(SEPARATORS, key=columns)


def _csv_rows(text: str, delimiter: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each row of a CSV text.

    If a row spans several lines, its number is that of the first line. A blank line has no cells.
    """
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter, strict=True)
    start = 1
    try:
        for row in reader:
            yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        kind = SEPARATORS[delimiter]
        raise DpfedError(
            f"line {start} of {path} is not {kind}-separated text: {reason(error)}"
        ) from None


def read_tsv(path: Path) -> Columns:
    """Return the table in a tab-separated file. Quotes are plain characters, as in GLUE."""
    lines = enumerate(lines_of(read_bytes(path), str(path)), 1)
    return _from_rows(path, ((i, line.split("\t") if line else []) for i, line in lines))


def _from_rows(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Columns:
    """Return the table of a text file from its rows, each given as (line number, cells).

    The first row has the names of the columns. Empty rows are skipped.
    """
    _, header = next(rows, (1, []))
    _refuse_repeated(header, path)
    filled = [(number, row) for number, row in rows if row]
    for number, row in filled:
        if len(row) != len(header):
            raise DpfedError(
                f"line {number} of {path} has {len(row)} columns, the first line {len(header)}: "
                "mend that row"
            )
    values = {name: [row[i] for _, row in filled] for i, name in enumerate(header)}
    return Columns(str(path), values, [number for number, _ in filled])


def _refuse_repeated(names: list[str], path: Path) -> None:
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise DpfedError(f"{path} has two columns {twice!r} in its first line: rename one")


def read_jsonl(path: Path) -> Columns:
    """Return the table in a file with one JSON object per line.

    The columns are the keys of all lines. If a line lacks a key, its value is None.
    """
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines_of(read_bytes(path), str(path)), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DpfedError(f"line {number} of {path} is not JSON: {reason(error)}") from None
        if not isinstance(record, dict):
            raise DpfedError(f"line {number} of {path} is not a JSON object with named values")
        records[number] = record
    names = dict.fromkeys(name for record in records.values() for name in record)
    values = {name: [record.get(name) for record in records.values()] for name in names}
    return Columns(str(path), values, list(records))


def read_parquet(path: Path) -> Columns:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DpfedError(
            f"{path} is a Parquet file: pip install 'dpfed[parquet]' to read it"
        ) from None
    with reading(path):
        try:
            table = parquet.read_table(path)
            columns = [column.to_pylist() for column in table.columns]
        except Exception as error:
            # Catch all errors, because pyarrow raises a different class for each kind of damage.
            raise DpfedError(f"{path} cannot be read as Parquet: {reason(error)}") from None
    names = list(map(str, table.column_names))
    _refuse_repeated(names, path)
    values = dict(zip(names, columns, strict=True))
    return Columns(str(path), values, list(range(1, table.num_rows + 1)), unit="row")


READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}

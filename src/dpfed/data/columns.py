"""A user's table, column by column, from CSV, TSV, JSON lines or Parquet; every row knows how to name itself."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.data.cache import text_array
from dpfed.data.files import lines_of, read_bytes, reading, reason
from dpfed.errors import DpfedError

LONGEST_FIELD = 1 << 27
LONGEST_HEADER = 1 << 16
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


@dataclass(frozen=True)
class Columns:
    """Columns by name, all of one length.

    rows       line numbers in the file, or row numbers where it has no lines
    separator  what stands between the columns of a CSV file
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

    def texts(self, name: str, key: str) -> np.ndarray:
        """A column of texts, none of them empty: an empty one would train on its label alone."""
        column = self.get(name, key)
        for i, text in enumerate(column):
            if not isinstance(text, str) or not text.strip():
                what = (
                    "an empty text"
                    if text is None or text == "" or isinstance(text, str)
                    else f"{text!r:.60}, not a text,"
                )
                raise DpfedError(
                    f"{self.place(i)} has {what} in column {name!r}: mend or drop that row"
                )
        return text_array(column)

    def key_column(self, name: str, key: str) -> np.ndarray:
        """A column that names clients or units: of one type, with a value in every row."""
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
    """Return True for None, NaN and the missing values of pandas, which have no truth value."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def plain_column(column: list[Any]) -> np.ndarray | None:
    """An array that can be sorted, or None where the values are of several kinds or missing."""
    if all(isinstance(v, str) for v in column):
        return text_array(column)
    if all(isinstance(v, bool | int) and abs(v) < 2**63 for v in column):
        return np.array(column, dtype=np.int64)
    if all(isinstance(v, int | float) for v in column):
        return np.array(column, dtype=np.float64)
    return None


def read_columns(path: Path) -> Columns:
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


def _header(names: list[str], path: Path) -> None:
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise DpfedError(f"{path} has two columns {twice!r} in its first line: rename one")


def read_csv(path: Path) -> Columns:
    """Return a table with commas, semicolons or tabs and double quotes, as spreadsheets write it."""
    text = "\n".join(lines_of(read_bytes(path), str(path)))  # names the line that is not UTF-8
    delimiter = _delimiter(text)
    old = csv.field_size_limit(LONGEST_FIELD)
    header: list[str] = []
    cells: list[list[str]] = []
    rows: list[int] = []
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter, strict=True)
    start = 1
    try:
        header = next(reader, [])
        _header(header, path)
        start = reader.line_num + 1
        for row in reader:
            if row:
                _width(row, header, start, path)
                cells.append(row)
                rows.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        kind = SEPARATORS[delimiter]
        raise DpfedError(
            f"line {start} of {path} is not {kind}-separated text: {reason(error)}"
        ) from None
    finally:
        csv.field_size_limit(old)
    return replace(_by_column(path, header, cells, rows), separator=SEPARATORS[delimiter])


def _delimiter(text: str) -> str:
    """Return the separator that gives the first line the most columns; a comma if several do."""
    start = text[:LONGEST_HEADER]

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(start, newline="\n"), delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(SEPARATORS, key=columns)


def read_tsv(path: Path) -> Columns:
    """Tab-separated without any quoting, as GLUE has it: a quotation mark is a character like any other."""
    lines = lines_of(read_bytes(path), str(path))
    header = next(lines, "").split("\t")
    _header(header, path)
    cells: list[list[str]] = []
    rows: list[int] = []
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        row = line.split("\t")
        _width(row, header, number, path)
        cells.append(row)
        rows.append(number)
    return _by_column(path, header, cells, rows)


def _width(row: list[str], header: list[str], number: int, path: Path) -> None:
    if len(row) != len(header):
        raise DpfedError(
            f"line {number} of {path} has {len(row)} columns, the first line {len(header)}: mend that row"
        )


def _by_column(path: Path, header: list[str], cells: list[list[str]], rows: list[int]) -> Columns:
    return Columns(
        str(path), {name: [row[i] for row in cells] for i, name in enumerate(header)}, rows
    )


def read_jsonl(path: Path) -> Columns:
    """One JSON object in each line; a key that a line does not have is a missing value there."""
    records: list[dict[str, Any]] = []
    rows: list[int] = []
    for number, line in enumerate(lines_of(read_bytes(path), str(path)), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DpfedError(f"line {number} of {path} is not JSON: {reason(error)}") from None
        if not isinstance(record, dict):
            raise DpfedError(f"line {number} of {path} is not a JSON object with named values")
        records.append(record)
        rows.append(number)
    names = dict.fromkeys(name for record in records for name in record)
    return Columns(
        str(path), {name: [record.get(name) for record in records] for name in names}, rows
    )


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
            values = {
                str(name): table.column(i).to_pylist() for i, name in enumerate(table.column_names)
            }
        except Exception as error:  # pyarrow has a tree of errors of its own
            raise DpfedError(f"{path} cannot be read as Parquet: {reason(error)}") from None
    _header(list(map(str, table.column_names)), path)
    return Columns(str(path), values, list(range(1, table.num_rows + 1)), unit="row")


READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}

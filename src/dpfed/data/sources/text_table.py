"""A user's own texts: a CSV, TSV, JSONL or Parquet table with a column of texts and one of labels.

    [data]
    name = "text-table"
    path = "private.csv"       # the clients' records
    test_path = "public.csv"   # the server's test set: a part of the private records would not be public
    text = "note"
    label = "diagnosis"
    classes = ["benign", "malignant"]
    partition = "natural"
    client_column = "hospital"

All other columns can serve as `data.client_column` and `data.unit_column`. TSV files have no quoting.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from dpfed.config import DataSection
from dpfed.data.columns import Columns, plain_column, read_columns
from dpfed.data.files import reading
from dpfed.data.labels import Column, encode
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError

Count = Annotated[int, Ge(2)]


@dataclass(frozen=True)
class TextTable(DataSection):
    name: str = "text-table"
    test_path: Annotated[str | None, "table with the server's public test set"] = None
    text: Annotated[str, "column with the text"] = "text"
    text_pair: Annotated[str | None, "column with a second text, for pairs"] = None
    label: Annotated[
        str, 'column with the label; "" where there is none, as for language modelling'
    ] = "label"
    classes: Annotated[
        tuple[str, ...] | Count | None,
        "names of the classes, or how many; default: as the labels show",
    ] = None

    def load(self) -> Source:
        if self.path is None or self.test_path is None:
            raise DpfedError(
                'data.name = "text-table" reads two tables (.csv, .tsv, .jsonl or .parquet): set data.path to the private '
                "records and data.test_path to a public test set"
            )
        paths = [Path(p).expanduser() for p in (self.path, self.test_path)]
        with reading(paths[0]):
            if paths[0].exists() and paths[1].exists() and paths[0].samefile(paths[1]):
                raise DpfedError(
                    "data.test_path is data.path: the test set is public and must be other records"
                )
        train, test = (read_columns(path) for path in paths)
        labels, classes, declared = self._labels(train, test)
        return Source(
            train=Table(self._inputs(train), labels[0], self._columns(train)),
            test=Table(self._inputs(test), labels[1]),
            classes=classes,
            kind="text",
            declared=declared,
            fingerprint=self._fingerprint(paths),
            notes=tuple(
                f"{table.label} is read with a {table.separator} between columns"
                for table in (train, test)
                if table.separator != "comma"
            ),
        )

    def _labels(
        self, train: Columns, test: Columns
    ) -> tuple[tuple[np.ndarray, ...], tuple[str, ...], bool]:
        if not self.label:
            return (
                tuple(np.zeros(len(t.rows), dtype=np.int64) for t in (train, test)),
                ("text",),
                True,
            )
        parts = [Column(t.get(self.label, "data.label"), t.places()) for t in (train, test)]
        found = encode(parts, self.classes)
        return found.parts, found.names, found.declared

    def _inputs(self, table: Columns) -> dict[str, np.ndarray]:
        out = {"text": table.texts(self.text, "data.text")}
        if self.text_pair is not None:
            out["text_pair"] = table.texts(self.text_pair, "data.text_pair")
        return out

    def _columns(self, table: Columns) -> dict[str, np.ndarray]:
        used = {self.text, self.text_pair, self.label}
        columns = {}
        for name, values in table.values.items():
            array = plain_column(values) if name not in used else None
            if array is not None:
                columns[name] = array
        for key, wanted in (
            ("data.client_column", self.client_column),
            ("data.unit_column", self.unit_column),
        ):
            if wanted is not None:
                columns[wanted] = table.key_column(wanted, key)
        return columns

    def _fingerprint(self, paths: list[Path]) -> str:
        """Of the content, not of the files' times: a user's table is small enough to be read whole each time."""
        digest = hashlib.sha256(json.dumps([self.text, self.text_pair]).encode())
        for path in paths:
            with reading(path), path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

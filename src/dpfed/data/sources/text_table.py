"""A user's own texts: a CSV, TSV, JSONL or Parquet table with a column of texts and one of labels.

    [data]
    name = "text-table"
    path = "private.csv"       # the clients' records
    test_path = "public.csv"   # the server's test set; private records must not be in it
    text = "note"
    label = "diagnosis"
    classes = ["benign", "malignant"]
    partition = "natural"
    client_column = "hospital"

Any other column can be `data.client_column` or `data.unit_column`. In TSV files a quotation mark is
a plain character.
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
from dpfed.data.columns import Columns, read_columns
from dpfed.data.files import reading
from dpfed.data.labels import Column, Encoded, encode
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError

Count = Annotated[int, Ge(2)]


@dataclass(frozen=True)
class TextTable(DataSection):
    name: str = "text-table"
    test_path: Annotated[str | None, "table with the server's public test set"] = None
    text: Annotated[str, "column with the text"] = "text"
    text_pair: Annotated[str | None, "column with a second text, for pairs"] = None
    label: Annotated[str, 'column with the label; "" if there is none, as for language models'] = (
        "label"
    )
    classes: Annotated[
        tuple[str, ...] | Count | None,
        "names of the classes, or how many; default: as the labels show",
    ] = None

    def load(self) -> Source:
        if self.path is None or self.test_path is None:
            raise DpfedError(
                'data.name = "text-table" reads two tables (.csv, .tsv, .jsonl or .parquet): set '
                "data.path to the private records and data.test_path to a public test set"
            )
        paths = [Path(p).expanduser() for p in (self.path, self.test_path)]
        with reading(paths[0]):
            if paths[0].exists() and paths[1].exists() and paths[0].samefile(paths[1]):
                raise DpfedError(
                    "data.test_path is data.path: the test set is public and must be other records"
                )
        train, test = (read_columns(path) for path in paths)
        labels = self._labels(train, test)
        inputs = [table.texts(self.text, self.text_pair) for table in (train, test)]
        used = {self.text, self.text_pair, self.label}
        columns = train.other_columns(used, self.client_column, self.unit_column)
        return Source(
            train=Table(inputs[0], labels.parts[0], columns),
            test=Table(inputs[1], labels.parts[1]),
            classes=labels.names,
            kind="text",
            declared=labels.declared,
            fingerprint=self._fingerprint(paths),
            notes=tuple(
                f"{table.label} is read with a {table.separator} between columns"
                for table in (train, test)
                if table.separator != "comma"
            ),
        )

    def _labels(self, train: Columns, test: Columns) -> Encoded:
        if not self.label:
            zeros = tuple(np.zeros(len(t.rows), dtype=np.int64) for t in (train, test))
            return Encoded(zeros, ("text",), declared=True)
        parts = [Column(t.get(self.label, "data.label"), t.places()) for t in (train, test)]
        return encode(parts, self.classes)

    def _fingerprint(self, paths: list[Path]) -> str:
        """Return a hash of both files and of the names of the text columns.

        The files are hashed on each call, because users' tables are small.
        """
        digest = hashlib.sha256(json.dumps([self.text, self.text_pair]).encode())
        for path in paths:
            with reading(path), path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

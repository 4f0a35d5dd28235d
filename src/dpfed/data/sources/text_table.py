"""A user's own texts: a CSV, TSV, JSONL or Parquet table with a column of texts and one of labels.

For language models a table has no labels: its records are texts, prompts with completions, or
chats. With `model.task = "regress"` labels are numbers. With "multilabel" they are names between
semicolons or a JSON list; or `data.label` lists several columns of 0 and 1.

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
a plain character. If `path` is a folder, its files called `train` and `test` are the tables.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from dpfed.config import DataSection, LabelTask
from dpfed.data.columns import READERS, Columns, read_columns
from dpfed.data.files import reading
from dpfed.data.labels import Column, Encoded, encode_as, no_labels, refuse_unlabelled
from dpfed.data.language import input_columns, label_column, stated_columns
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError

Count = Annotated[int, Ge(2)]
# Spellings of 0 and 1 in text files of spreadsheets and data frames, each with its number.
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1}


@dataclass(frozen=True)
class TextTable(DataSection):
    tasks = ("classify", "regress", "multilabel")

    name: str = "text-table"
    test_path: Annotated[str | None, "table with the server's public test set"] = None
    text: Annotated[str | None, 'column with the text; default: "text" if there is one'] = None
    text_pair: Annotated[str | None, "column with a second text, for pairs"] = None
    prompt: Annotated[str | None, "column with the prompt of a completion"] = None
    completion: Annotated[str | None, "column with the completion, which alone is learnt"] = None
    messages: Annotated[
        str | None, "column with a chat, of which the assistant's messages are learnt"
    ] = None
    label: Annotated[
        str | tuple[str, ...] | None,
        'column with the label, or columns of 0 and 1 for multilabel; "": there is none; '
        'default: "label" if there is one',
    ] = None
    classes: Annotated[
        tuple[str, ...] | Count | None,
        "names of the classes, or how many; default: as the labels show",
    ] = None

    def load(self, task: LabelTask = "classify") -> Source:
        private, test = self._paths()
        if private is None or test is None:
            raise DpfedError(
                'data.name = "text-table" reads two tables (.csv, .tsv, .jsonl or .parquet): set '
                "data.path to the private records and data.test_path to a public test set"
            )
        return self._source([private, test], task)

    def load_train(self, task: LabelTask = "classify") -> Source:
        """Return the data of a client in a network, which may have no test table.

        Without a test table, `test` of the result equals `train`.
        """
        private, test = self._paths()
        if private is None or test is not None:
            return self.load(task)
        source = self._source([private, private], task)
        return replace(source, test=source.train)

    def load_test(self, task: LabelTask = "classify") -> Source:
        """Return the data of the server in a network, which may have no training table.

        Without a training table, `train` of the result equals `test`.
        """
        private, test = self._paths()
        if test is None or private is not None:
            return self.load(task)
        return self._source([test, test], task)

    def _paths(self) -> tuple[Path | None, Path | None]:
        """Return the paths of the private and the test table; None for a table that is not set."""
        paths = [None if p is None else Path(p).expanduser() for p in (self.path, self.test_path)]
        private, test = paths
        if private is None:
            return None, test
        with reading(private):
            if private.is_dir():
                return table_in(private, "train"), test or table_in(private, "test")
            if test is not None and private.exists() and test.exists() and private.samefile(test):
                raise DpfedError(
                    "data.test_path is data.path: the test set is public and must be other records"
                )
        return private, test

    def _source(self, paths: list[Path], task: LabelTask) -> Source:
        """Return the data source that the two tables at `paths` form: training and test records."""
        train, test = (read_columns(path) for path in paths)
        names = input_columns(stated_columns(self), train.values, train.label)
        label = label_column(self, train.values)
        labels = self._labels(train, test, label, task)
        inputs = [table.language_inputs(names) for table in (train, test)]
        label_columns = (label,) if isinstance(label, str) else label or ()
        used = {*names.values(), *label_columns}
        columns = train.other_columns(used, self.client_column, self.unit_column)
        return Source(
            train=Table(inputs[0], labels.parts[0], columns),
            test=Table(inputs[1], labels.parts[1]),
            classes=labels.names,
            kind="text",
            declared=labels.declared,
            fingerprint=self._fingerprint(paths, names),
            notes=tuple(
                f"{table.label} is read with a {table.separator} between columns"
                for table in (train, test)
                if table.separator != "comma"
            ),
            task=task,
        )

    def _labels(
        self, train: Columns, test: Columns, label: str | tuple[str, ...] | None, task: LabelTask
    ) -> Encoded:
        if label is None:
            refuse_unlabelled(task, train.label)
            return no_labels(len(train.rows), len(test.rows))
        if isinstance(label, tuple):
            return self._flags(train, test, label, task)
        parts = [Column(t.get(label, "data.label"), t.places()) for t in (train, test)]
        return encode_as(task, parts, self.classes, label)

    def _flags(
        self, train: Columns, test: Columns, columns: tuple[str, ...], task: LabelTask
    ) -> Encoded:
        """Return the labels of a table that has one column of 0 and 1 for each class."""
        if task != "multilabel" or self.classes is not None:
            raise DpfedError(
                "data.label lists columns, which are the classes of "
                'model.task = "multilabel": set it, and leave data.classes out'
            )
        parts = []
        for table in (train, test):
            flags = [map(str, table.get(name, "data.label")) for name in columns]
            # CSV files have strings for 0 and 1, and other files have numbers. `flags` holds
            # strings for both.
            rows = [[FLAGS.get(value, value) for value in row] for row in zip(*flags, strict=True)]
            parts.append(Column(rows, table.places()))
        return encode_as(task, parts, columns)

    def _fingerprint(self, paths: list[Path], names: dict[str, str]) -> str:
        """Return a hash of both tables and of the names of the columns that the model reads.

        The files are hashed on each call, which is fast because users' tables are small.
        """
        digest = hashlib.sha256(json.dumps(sorted(names.items())).encode())
        for path in paths:
            with reading(path), path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def table_in(folder: Path, name: str) -> Path:
    """Return the path of the only table with this name in a folder, such as train.jsonl."""
    found = sorted(p for p in folder.glob(f"{name}.*") if p.suffix.lower() in READERS)
    if len(found) != 1:
        have = " and ".join(p.name for p in found) or "none"
        raise DpfedError(
            f"the folder {folder} needs one table {name}.csv, .tsv, .jsonl or .parquet and has "
            f"{have}: set data.path and data.test_path to files"
        )
    return found[0]

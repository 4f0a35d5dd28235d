"""A data set that the `datasets` library loads: a name on the Hugging Face hub, or a folder.

    [data]
    name = "hub"
    dataset = "stanfordnlp/sst2"    # or a folder: data files, or the result of save_to_disk
    text = "sentence"
    test_split = "validation"

Set `data.text` (and `data.text_pair`) to the columns with texts, or `data.image` to the column with
images. For a language model, `data.prompt` and `data.completion`, or `data.messages`, can be set
instead. This source never runs code that a data set on the hub contains.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from dpfed.config import DataSection, LabelTask
from dpfed.data.cache import Arrays, cached, key_of
from dpfed.data.columns import Columns
from dpfed.data.images import Colour, decode_all
from dpfed.data.labels import (
    Column,
    Encoded,
    encode,
    encode_as,
    no_labels,
    refuse_unlabelled,
    stated_names,
    with_names,
)
from dpfed.data.language import LABEL, input_columns, label_column, stated_columns
from dpfed.data.tables import Kind, Source, Table
from dpfed.errors import DpfedError, reason

VERSION = 1
Count = Annotated[int, Ge(2)]


@dataclass(frozen=True)
class Hub(DataSection):
    tasks = ("classify", "regress", "multilabel")

    name: str = "hub"
    dataset: Annotated[str | None, "name on the hub, or a folder"] = None
    subset: Annotated[str | None, "configuration of the data set, if it has several"] = None
    train_split: Annotated[str, "split with the clients' records"] = "train"
    test_split: Annotated[str, "split with the server's test set"] = "test"
    text: Annotated[str | None, "column with the text"] = None
    text_pair: Annotated[str | None, "column with a second text, for pairs"] = None
    prompt: Annotated[str | None, "column with the prompt of a completion"] = None
    completion: Annotated[str | None, "column with the completion, which alone is learnt"] = None
    messages: Annotated[
        str | None, "column with a chat, of which the assistant's messages are learnt"
    ] = None
    image: Annotated[str | None, "column with the image"] = None
    label: Annotated[
        str | None, 'column with the label; "": there is none; default: "label" if there is one'
    ] = None
    size: Annotated[
        int | None, Ge(1), Le(4096), "images: resize the shorter side to this and crop the middle"
    ] = None
    colour: Annotated[Colour, "images: three channels or one"] = "rgb"
    classes: Annotated[
        tuple[str, ...] | Count | None,
        "names of the classes, or how many; default: as the data set declares",
    ] = None

    def load(self, task: LabelTask = "classify") -> Source:
        wanted = self.dataset or self.path
        if wanted is None:
            raise DpfedError(
                'data.name = "hub" loads a data set: set data.dataset to its name on the hub or to '
                "a folder"
            )
        reads_text = any(stated_columns(self).values())
        if reads_text == (self.image is not None):
            raise DpfedError(
                "set exactly one of data.text and data.image to the column that the model reads, "
                "or data.messages or data.prompt and data.completion"
            )
        if self.train_split == self.test_split:
            raise DpfedError(
                "data.test_split is data.train_split: the test set is public and must be other "
                "records"
            )
        splits = fetch(wanted, self.subset, (self.train_split, self.test_split))
        return self._source(wanted, splits, task)

    def _source(self, wanted: str, splits: list[Any], task: LabelTask) -> Source:
        tables = [
            columns_of(split, f"{wanted} ({part})", without=self.image)
            for split, part in zip(splits, (self.train_split, self.test_split), strict=True)
        ]
        fingerprint = self._fingerprint(splits)
        label = label_column(self, tables[0].values)
        labels = self._labels(splits[0], tables, label, task)
        kind: Kind = "text"
        used = {self.image, label}
        if self.image is not None:
            kind = "image"
            inputs = self._images(splits, tables, fingerprint)
        else:
            names = input_columns(stated_columns(self), tables[0].values, tables[0].label)
            inputs = [table.language_inputs(names) for table in tables]
            used |= set(names.values())
        columns = tables[0].other_columns(used, self.client_column, self.unit_column)
        return Source(
            train=Table(inputs[0], labels.parts[0], columns),
            test=Table(inputs[1], labels.parts[1]),
            classes=labels.names,
            kind=kind,
            declared=labels.declared,
            fingerprint=fingerprint,
            task=task,
        )

    def _labels(
        self, train: Any, tables: list[Columns], label: str | None, task: LabelTask
    ) -> Encoded:
        """Return the labels of the training and the test table; only text data may lack labels."""
        if label is None and self.image is None:
            refuse_unlabelled(task, tables[0].label)
            return no_labels(*(len(table.rows) for table in tables))
        name = label or LABEL
        columns = [Column(t.get(name, "data.label"), t.places()) for t in tables]
        names = () if task == "regress" else stated_names(train, name)
        if task == "classify":
            stated = names if len(names) > 1 else None
            return encode(columns, self.classes or stated)
        if names:
            columns = [with_names(column, names) for column in columns]
        return encode_as(task, columns, self.classes or names or None, name)

    def _fingerprint(self, splits: list[Any]) -> str:
        """Return a hash that identifies the splits and the settings with which they are read.

        Return "" if the `datasets` library gives no fingerprint of a split.
        """
        marks = [str(getattr(split, "_fingerprint", "")) for split in splits]
        inputs = list(stated_columns(self).values())
        options = [*inputs, self.image, self.size, self.colour]
        if not all(marks):
            return ""
        return key_of(self.name, VERSION, (), {"marks": marks, "options": options})

    def _images(
        self, splits: list[Any], tables: list[Columns], fingerprint: str
    ) -> list[dict[str, np.ndarray]]:
        def build() -> Arrays:
            pairs = zip(splits, tables, strict=True)
            raw = [encoded_images(split, str(self.image), table) for split, table in pairs]
            pixels = decode_all(
                [*raw[0], *raw[1]].__getitem__,
                [place for table in tables for place in table.places()],
                "set data.size to one size",
                self.colour,
                self.size,
            )
            return {"train": pixels[: len(raw[0])], "test": pixels[len(raw[0]) :]}

        arrays = cached(fingerprint, build) if fingerprint else build()
        return [{"pixel_values": np.asarray(arrays[part])} for part in ("train", "test")]


def fetch(wanted: str, subset: str | None, splits: tuple[str, str]) -> list[Any]:
    """Return the training and the test split of the data set `wanted`, a folder or a hub name."""
    try:
        import datasets
    except ImportError:
        raise DpfedError(
            "data.name = \"hub\" needs the datasets library: pip install 'dpfed[hub]'"
        ) from None
    folder = Path(wanted).expanduser()
    if wanted.startswith((".", "~", os.sep)) and not folder.exists():
        raise DpfedError(
            f"there is no folder {wanted}: set data.dataset to a folder or a name on the hub"
        )
    try:
        datasets.disable_progress_bars()
        if (folder / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            return [saved[split] for split in splits]
        name = str(folder) if folder.exists() else wanted
        return [datasets.load_dataset(name, subset, split=split) for split in splits]
    except Exception as error:
        # Catch all errors. They may come from the network, from a parser of data files, or from the
        # cache of the `datasets` library.
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise DpfedError(
            f"data.dataset = {wanted!r} cannot be loaded with splits {splits[0]!r} and "
            f"{splits[1]!r}: {reason(error)}{offline}"
        ) from None


def columns_of(split: Any, label: str, without: str | None) -> Columns:
    """Return the columns of a split, except the column `without`, which holds images.

    label  name of the split in errors
    """
    try:
        names = [name for name in split.column_names if name != without]
        values = {name: list(split.with_format(None)[name]) for name in names}
        count = len(split)
    except Exception as error:
        raise DpfedError(f"{label} cannot be read: {reason(error)}") from None
    if not count:
        raise DpfedError(f"{label} has no records")
    return Columns(label, values, list(range(1, count + 1)), unit="row")


def encoded_images(split: Any, column: str, table: Columns) -> list[bytes]:
    """Return the images of a column, each as the content of an image file, not yet decoded.

    table  the other columns of the split, for errors
    """
    import datasets

    if column not in split.column_names:
        raise DpfedError(
            f"{table.label} has no column {column!r}: set data.image to one of "
            f"{', '.join(split.column_names)}"
        )
    out = []
    try:
        cells = list(split.cast_column(column, datasets.Image(decode=False))[column])
    except Exception as error:
        raise DpfedError(
            f"column {column!r} of {table.label} does not hold images: {reason(error)}"
        ) from None
    for i, cell in enumerate(cells):
        file = cell if isinstance(cell, dict) else {}
        data = file.get("bytes")
        try:
            out.append(Path(str(file.get("path"))).read_bytes() if data is None else data)
        except OSError as error:
            raise DpfedError(f"{table.place(i)} has no image: {reason(error)}") from None
    return out

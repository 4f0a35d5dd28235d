"""Data that a program hands over: columns by their names, whatever holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpfed.data.sources import REGISTRY
from dpfed.data.sources.in_memory import source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError


class Column:
    """A column as data frames and datasets have them: it has a length and rows, and is no array."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        return self.values[i]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class Frame:
    """As pandas: names in `columns`."""

    def __init__(self, **columns: list[Any]) -> None:
        self._data = columns

    @property
    def columns(self) -> list[str]:
        return list(self._data)

    def __getitem__(self, name: str) -> Column:
        return Column(self._data[name])


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Dataset(Frame):
    """As Hugging Face's: names in `column_names`, class names in `features`."""

    def __init__(self, names: list[str] | None = None, **columns: list[Any]) -> None:
        super().__init__(**columns)
        self.features = {name: object() for name in columns}
        if names:
            self.features["label"] = ClassLabel(names)

    columns = property(lambda self: (_ for _ in ()).throw(AttributeError))  # type: ignore[assignment]

    @property
    def column_names(self) -> list[str]:
        return list(self._data)


TEXT = {"text": ["good", "bad", "fine"], "label": [1, 0, 1]}


def both(data: Any, classes: Any = None) -> Source:
    return source_of(data, copy.copy(data), classes)


@pytest.mark.parametrize("kind", [dict, Frame, Dataset])
def test_columns_from_any_holder(kind: Any) -> None:
    source = both(kind(**TEXT, hospital=["a", "b", "a"], ward=[1, 2, 1]))
    assert source.kind == "text"
    assert source.train.inputs["text"].tolist() == TEXT["text"]
    assert source.train.labels.tolist() == [1, 0, 1]
    assert source.train.column("hospital").tolist() == ["a", "b", "a"]
    assert source.train.column("ward").tolist() == [1, 2, 1]


def test_class_names() -> None:
    assert both(TEXT).classes == ("0", "1")
    assert not both(TEXT).declared  # read off private labels
    named = both(Dataset(["bad", "good"], **TEXT))
    assert (named.classes, named.declared) == (("bad", "good"), True)
    given = both(TEXT, ["no", "yes", "perhaps"])
    assert (given.classes, given.declared) == (("no", "yes", "perhaps"), True)
    with pytest.raises(DpfedError, match="must name at least two classes"):
        both(TEXT, ["only"])
    assert source_of(TEXT, {"text": ["x"], "label": [4]}).classes == ("0", "1", "2", "3", "4")


class Categorical(Column):
    """As a categorical column of pandas: an array of its values, and the categories in its type."""

    def __init__(self, values: list[Any], categories: list[Any]) -> None:
        super().__init__(values)
        self.dtype = SimpleNamespace(categories=categories)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.values, dtype=object)


def test_labels_may_be_names() -> None:
    words = {"text": ["a", "b", "c"], "label": ["pos", "neg", "pos"]}
    found = both(words)
    assert (found.classes, found.declared) == (("neg", "pos"), False)
    assert found.train.labels.tolist() == [1, 0, 1]
    given = both(words, ["pos", "neg", "other"])
    assert (given.classes, given.declared) == (("pos", "neg", "other"), True)
    assert given.train.labels.tolist() == [0, 1, 0]
    with pytest.raises(
        DpfedError, match=r"row 1 of train has label 'neg'; it must be one of .*classes"
    ):
        both(words, ["pos", "none"])
    assert source_of(words, {"text": ["x"], "label": ["new"]}).classes == ("neg", "new", "pos")


@pytest.mark.parametrize("holder", [list, np.array, Column])
def test_labels_may_be_numbers_of_any_type(holder: Any) -> None:
    for values in ([1, 0, 1], [1.0, 0.0, 1.0], [True, False, True], ["1", "0", "1"]):
        found = both({"text": ["a", "b", "c"], "label": holder(values)})
        assert found.train.labels.tolist() == [1, 0, 1]
        assert found.train.labels.dtype == np.int64


def test_categorical_columns() -> None:
    """Categories give names and order. pandas reads them off the labels: not a declaration."""
    column = Categorical(["high", "low", "high"], ["low", "high"])
    found = both(
        {"text": ["a", "b", "c"], "label": column, "ward": Categorical(["x", "y", "x"], ["x", "y"])}
    )
    assert (found.classes, found.declared) == (("low", "high"), False)
    assert found.train.labels.tolist() == [1, 0, 1]
    assert found.train.column("ward").tolist() == ["x", "y", "x"]
    assert both(
        {"text": ["a", "b", "c"], "label": column}, ["high", "low"]
    ).train.labels.tolist() == [0, 1, 0]
    numbers = both({"text": ["a", "b"], "label": Categorical([0, 7], [0, 7])})
    assert (numbers.classes, numbers.train.labels.tolist()) == (("0", "7"), [0, 1])
    with pytest.raises(DpfedError, match="row 1 of train has no label"):
        both({"text": ["a", "b"], "label": Categorical(["low", float("nan")], ["low", "high"])})


def test_numbers_of_a_dataset_with_named_classes_are_places_in_its_list() -> None:
    found = both(Dataset(["1", "0"], text=["a", "b"], label=[0, 1]))
    assert (found.classes, found.train.labels.tolist()) == (("1", "0"), [0, 1])


@pytest.mark.parametrize("classes", ["ab", 1, 2.5, {"a": 1}])
def test_classes_are_a_list_of_names_or_their_number(classes: Any) -> None:
    with pytest.raises(DpfedError, match="classes"):
        both(TEXT, classes)


def test_the_number_of_classes_is_enough() -> None:
    found = both({"text": ["a", "b"], "label": [0, 7]}, 8)
    assert (len(found.classes), found.declared) == (8, True)
    with pytest.raises(
        DpfedError, match="row 1 of train has label '7'; it must be a whole number from 0 to 6"
    ):
        both({"text": ["a", "b"], "label": [0, 7]}, 7)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("text", "text_pair"),
        ("sentence1", "sentence2"),
        ("premise", "hypothesis"),
        ("question", "sentence"),
        ("question1", "question2"),
    ],
)
def test_pairs_of_texts_by_the_names_of_glue(one: str, two: str) -> None:
    source = both({two: ["b1", "b2"], one: ["a1", "a2"], "label": [0, 1]})
    assert source.train.inputs["text"].tolist() == ["a1", "a2"]
    assert source.train.inputs["text_pair"].tolist() == ["b1", "b2"]
    assert source.train.columns == {}


def picture(mode: str, size: tuple[int, int] = (3, 2), value: int = 7) -> Image.Image:
    return Image.new(
        mode, size, value if mode in ("L", "P") else (value, 0, 255) if mode == "RGB" else None
    )


def test_pictures() -> None:
    source = both({"image": [picture("RGB"), picture("RGB", value=9)], "label": [0, 1]})
    x = source.train.inputs["pixel_values"]
    assert (x.shape, x.dtype, source.kind) == ((2, 3, 2, 3), np.uint8, "image")  # 3 wide, 2 high
    assert x[:, :, 0, 0].tolist() == [[7, 0, 255], [9, 0, 255]]
    grey = both({"img": [picture("L"), picture("L")], "label": [0, 1]}).train.inputs["pixel_values"]
    assert grey.shape == (2, 1, 2, 3)
    assert (grey == 7).all()


def test_grey_pictures_among_colours_are_repeated() -> None:
    x = both({"image": [picture("L"), picture("RGB")], "label": [0, 1]}).train.inputs[
        "pixel_values"
    ]
    assert x[:, :, 0, 0].tolist() == [[7, 7, 7], [7, 0, 255]]


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (2, 4, 5, 3), (2, 1, 4, 5), (2, 4, 5, 1), (2, 4, 5), (2, 3, 4, 3)]
)
def test_arrays_of_pixels_in_either_order(shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    want = {
        (2, 4, 5, 3): np.moveaxis(x, -1, 1),
        (2, 4, 5, 1): np.moveaxis(x, -1, 1),
        (2, 4, 5): x[:, None],
    }.get(shape, x)
    for column in (x, list(x)):
        for name in ("image", "x"):
            got = both({name: column, "label": [0, 1]})
            assert got.kind == "image"
            assert np.array_equal(got.train.inputs["pixel_values"], want)


@pytest.mark.parametrize("name", ["features", "x"])
@pytest.mark.parametrize(
    "rows", [[[1.0, 2.0], [3.0, 4.0]], [[1, 2], [3, 4]], np.eye(2), np.eye(2, dtype=np.int64)]
)
def test_rows_of_numbers(name: str, rows: Any) -> None:
    source = both({name: rows, "y": np.array([0, 1])})
    assert source.kind == "features"
    assert source.train.inputs["features"].dtype == np.float32
    assert np.array_equal(source.train.inputs["features"], np.asarray(rows))


def test_columns_of_no_use_are_left_out() -> None:
    """Ragged lists and objects, which tokenised datasets have, cannot name clients."""
    source = both(
        {**TEXT, "tokens": [[1], [1, 2], []], "object": [None, {}, []], "box": np.ones((3, 2))}
    )
    assert source.train.columns == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "must be a dictionary of columns, a data frame, .* or a torch Dataset, not int"),
        ([1, 2], "not list"),
        ({}, "no column called label or labels or y"),
        ({"sentence": ["a"]}, "no column called label .* it has: sentence"),
        (
            {"label": [0]},
            "no column that a model reads: call one 'text', 'messages', .* it has: label",
        ),
        ({"text": [], "label": []}, "must be a non-empty list with one label for each record"),
        ({"text": ["a"], "label": [0.5]}, r"has numbers such as 0\.5, which are no classes"),
        ({"text": ["a", "b"], "label": ["good", None]}, "row 1 of train has no label"),
        ({"text": ["a", "b"], "label": [1, float("nan")]}, "row 1 of train has no label"),
        (
            {"text": ["a", "b"], "label": [[0], [0, 1]]},
            "must be a non-empty list with one label for each record",
        ),
        ({"text": ["a"], "label": [-1]}, "row 0 of train has label -1: number the classes 0, 1, 2"),
        ({"text": ["a", "b"], "label": [0]}, "train has 1 records and 2 of text"),
        (
            {"text": ["a", None], "label": [0, 1]},
            "row 1 of the column text of train is no text but NoneType",
        ),
        ({"text": ["a", float("nan")], "label": [0, 1]}, "row 1 .* float"),
        (
            {"features": [[1.0], [1.0, 2.0]], "label": [0, 1]},
            "must be finite numbers, one row for each record",
        ),
        ({"features": [[1.0], [np.inf]], "label": [0, 1]}, "must be finite numbers"),
        ({"features": [["a"], ["b"]], "label": [0, 1]}, "must be finite numbers"),
        ({"features": [1.0, 2.0], "label": [0, 1]}, "one row for each record"),
        ({"image": np.zeros((2, 3, 4, 4), np.int64), "label": [0, 1]}, r"row 0 .* \(uint8\)"),
        ({"image": np.full((2, 3, 4, 4), 1.5), "label": [0, 1]}, "pixels outside 0 to 1"),
        ({"image": np.full((2, 3, 4, 4), np.nan), "label": [0, 1]}, "pixels outside 0 to 1"),
        ({"image": np.zeros((2, 5, 4, 7), np.uint8), "label": [0, 1]}, "1 or 3 channels"),
        ({"image": ["a.png", "b.png"], "label": [0, 1]}, "is no picture"),
        (
            {"image": [picture("L"), picture("L", (4, 4))], "label": [0, 1]},
            "row 1 .* 4 x 4 pixels and row 0 has 2 x 3",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(data: Any, words: str) -> None:
    with pytest.raises(DpfedError, match=words) as error:
        source_of(data, TEXT)
    assert "\n" not in str(error.value)


def test_private_records_are_not_the_public_test_set() -> None:
    """Scores on the test set are printed on the model card."""
    with pytest.raises(DpfedError, match="must be other records"):
        source_of(TEXT, TEXT)
    assert len(both(TEXT).test) == 3


def test_both_parts_must_be_alike() -> None:
    with pytest.raises(DpfedError, match="train has text and one of test has features: give"):
        source_of(TEXT, {"features": [[1.0]], "label": [0]})
    with pytest.raises(DpfedError, match="has text and one of test has text and text_pair"):
        source_of(TEXT, {**TEXT, "text_pair": TEXT["text"]})
    with pytest.raises(DpfedError, match=r"train has shape \(2,\) and one of test \(3,\)"):
        source_of({"x": np.eye(2), "y": [0, 1]}, {"x": np.eye(3), "y": [0, 1, 1]})


def test_a_configuration_alone_cannot_bring_them_back() -> None:
    with pytest.raises(DpfedError, match="only that program can give them again"):
        REGISTRY["given"]().load()  # type: ignore[attr-defined]

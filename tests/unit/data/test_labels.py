"""Labels that are numbers or sets of classes, from every kind of source."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from dpfed.data.labels import Column, encode_numbers, encode_sets, stated_names, with_names
from dpfed.data.sources.in_memory import source_of
from dpfed.data.sources.npz import Npz
from dpfed.data.sources.text_table import TextTable
from dpfed.data.tables import Source
from dpfed.errors import DpfedError

TEXTS = ["a b", "c d", "e f", "g h"]
SETS = [["new", "film"], [], ["film"], ["new"]]
FLAGS = [[1, 1], [0, 0], [1, 0], [0, 1]]


def column(*values: Any) -> Column:
    return Column(list(values), [f"row {i}" for i in range(len(values))])


@pytest.mark.parametrize(
    "cells",
    [
        SETS,
        [tuple(cell) for cell in SETS],
        [set(cell) for cell in SETS],
        ["new; film", "", "film", "new"],
        ['["new", "film"]', "[]", '["film"]', '["new"]'],
        [np.array(cell) for cell in SETS],
    ],
)
def test_sets_of_names(cells: list[Any]) -> None:
    found = encode_sets([column(*cells), column(["film"])], None)
    assert found.names == ("film", "new")
    assert not found.declared
    assert found.parts[0].tolist() == FLAGS
    assert found.parts[0].dtype == np.uint8
    declared = encode_sets([column(*cells), column(["film"])], ("new", "film", "old"))
    assert declared.declared
    assert declared.parts[0].tolist() == [[b, a, 0] for a, b in FLAGS]


@pytest.mark.parametrize("kind", [int, float, bool])
def test_vectors_of_0_and_1(kind: Any) -> None:
    cells = [[kind(flag) for flag in row] for row in FLAGS]
    found = encode_sets([column(*cells), column(cells[0])], ("film", "new"))
    assert found.parts[0].tolist() == FLAGS
    assert encode_sets([column(*cells), column(cells[0])], None).names == ("0", "1")


@pytest.mark.parametrize(
    ("cells", "classes", "sentence"),
    [
        (["film", "old"], ("film", "new"), r"row 1 has label 'old'; its labels must be among"),
        ([[1, 0], [1]], None, r"row 1 has labels \[1\]; give 2 numbers 0 or 1"),
        ([[1, 0], [1, 2]], None, r"row 1 has labels \[1, 2\]; give 2 numbers"),
        ([["film"], 7], None, "row 1 has label 7; it must be a list of class names"),
        (['["film"'], None, "row 0 has labels that are not JSON"),
        ([["film"]], 3, "is a number, and the labels are names: list the names"),
        ([[1, 0]], 3, "row 0 has 2 labels, and"),
        ([[], []], None, "must name at least two classes"),
    ],
)
def test_sets_that_cannot_be_read(cells: list[Any], classes: Any, sentence: str) -> None:
    with pytest.raises(DpfedError, match=sentence):
        encode_sets([column(*cells), column(cells[0])], classes)


def test_numbers() -> None:
    found = encode_numbers([column(1, "2.5", np.float32(4)), column(-1e6)], "price")
    assert found.parts[0].tolist() == [1.0, 2.5, 4.0]
    assert found.names == ("price",)
    assert found.declared


@pytest.mark.parametrize("value", ["many", None, float("nan"), float("inf"), 1e39, [1, 2]])
def test_what_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(DpfedError, match=r"row 1 has label .*; it must be a finite number"):
        encode_numbers([column(1.0, value)], "price")


def test_names_of_class_numbers_in_lists() -> None:
    feature = SimpleNamespace(feature=SimpleNamespace(names=["film", "new"]))
    data = SimpleNamespace(features={"labels": feature})
    assert stated_names(data, "labels") == ("film", "new")
    assert stated_names(data, "other") == ()
    assert with_names(column([1, 0], []), ("film", "new")).values == [["new", "film"], []]
    with pytest.raises(DpfedError, match="give class numbers from 0 to 1"):
        with_names(column([2]), ("film", "new"))


# ---- data in memory


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return torch.ones(3) * i, torch.tensor(FLAGS[i])


X = np.arange(12.0).reshape(4, 3)
FRAME = pandas.DataFrame(FLAGS, columns=["film", "new"])


NAMED = {"text": TEXTS, "label": SETS}
VECTORS = (X.copy(), FRAME.copy())


@pytest.mark.parametrize(
    ("data", "test"),
    [
        (dict(NAMED), NAMED),
        ({"text": TEXTS, "labels": FLAGS}, {"text": TEXTS, "label": FLAGS}),
        (pandas.DataFrame(NAMED), NAMED),
        ([{"text": text, "label": names} for text, names in zip(TEXTS, SETS, strict=True)], NAMED),
        (list(zip(TEXTS, SETS, strict=True)), NAMED),
        ((X, np.array(FLAGS)), VECTORS),
        ((X, torch.tensor(FLAGS)), VECTORS),
        ((X, FRAME), VECTORS),
        ((TEXTS, SETS), NAMED),
        (Pairs(), VECTORS),
        ([(X[:2], FRAME[:2]), (X[2:], FRAME[2:])], VECTORS),
        ({"north": (TEXTS[:2], SETS[:2]), "south": (TEXTS[2:], SETS[2:])}, NAMED),
    ],
)
def test_sets_in_memory(data: Any, test: Any) -> None:
    source = source_of(data, test, task="multilabel")
    assert source.train.labels.tolist() == FLAGS
    assert source.task == "multilabel"
    assert source.classes in (("film", "new"), ("0", "1"))


def test_columns_of_a_frame_name_the_classes() -> None:
    assert source_of((X, FRAME), VECTORS, task="multilabel").classes == ("film", "new")


@pytest.mark.parametrize(
    "data",
    [
        (X, np.array([1.5, 2.0, 3.0, 4.0])),
        (X, torch.tensor([[1.5], [2.0], [3.0], [4.0]])),
        (X, pandas.Series([1.5, 2.0, 3.0, 4.0], index=[3, 2, 1, 0])),
        {"features": X, "label": [1.5, 2, 3, 4]},
        {"north": (X[:2], [1.5, 2]), "south": (X[2:], [3, 4])},
    ],
)
def test_numbers_in_memory(data: Any) -> None:
    source = source_of(data, (X.copy(), [1, 2, 3, 4]), task="regress")
    assert source.train.labels.tolist() == [1.5, 2.0, 3.0, 4.0]
    assert source.classes == ("label",)


@pytest.mark.parametrize(
    ("labels", "task", "sentence"),
    [
        ([0.5, 1.5, 2.0, 3.0], "classify", r'such as 0\.5, which are no classes: .*"regress"'),
        (FLAGS, "classify", r'with several labels for a record, set .* = "multilabel"'),
        (["a", "b", "c", "d"], "regress", "row 0 of train has label 'a'; it must be a finite"),
        ([1, 2, 3, 4], "multilabel", "row 0 of train has label 1; it must be a list"),
    ],
)
def test_labels_of_another_task_are_one_sentence(labels: Any, task: Any, sentence: str) -> None:
    with pytest.raises(DpfedError, match=sentence):
        source_of((X, labels), (X.copy(), labels), task=task)


# ---- files


def table(folder: Path, **columns: list[Any]) -> dict[str, str]:
    for part in ("train", "test"):
        pandas.DataFrame({"text": TEXTS, **columns}).to_csv(folder / f"{part}.csv", index=False)
    return {"path": str(folder / "train.csv"), "test_path": str(folder / "test.csv")}


def loaded(task: Any, label: Any, classes: Any = None, **columns: Any) -> Source:
    return TextTable(**columns, label=label, classes=classes).load(task)


def test_a_table_with_names_between_semicolons(tmp_path: Path) -> None:
    files = table(tmp_path, tags=[";".join(cell) for cell in SETS])
    source = loaded("multilabel", "tags", **files)
    assert source.train.labels.tolist() == FLAGS
    assert source.classes == ("film", "new")


def test_a_table_with_a_column_for_each_class(tmp_path: Path) -> None:
    first, second = (list(flags) for flags in zip(*FLAGS, strict=True))
    files = table(tmp_path, film=first, new=second, site=["a", "b", "a", "b"])
    source = loaded("multilabel", ("film", "new"), **files)
    assert source.train.labels.tolist() == FLAGS
    assert source.classes == ("film", "new")
    assert source.declared
    assert set(source.train.columns) == {"site"}
    with pytest.raises(DpfedError, match=r"data\.label lists columns, which are the classes"):
        loaded("classify", ("film", "new"), **files)


def test_a_table_with_numbers(tmp_path: Path) -> None:
    files = table(tmp_path, stars=[1, 2.5, 4, 5])
    source = loaded("regress", "stars", **files)
    assert source.train.labels.tolist() == [1.0, 2.5, 4.0, 5.0]
    assert source.classes == ("stars",)
    with pytest.raises(DpfedError, match=r"line 2 of .*train.csv has label 'a b'; it must be a"):
        loaded("regress", "text", text="stars", **files)
    with pytest.raises(DpfedError, match="has no labels, and"):
        loaded("regress", "", **files)
    with pytest.raises(DpfedError, match="has no effect with numbers"):
        loaded("regress", "stars", classes=("a", "b"), **files)


@pytest.mark.parametrize(
    ("task", "labels"), [("regress", np.array([1.5, 2, 3, 4])), ("multilabel", np.array(FLAGS))]
)
def test_arrays_in_a_file(task: Any, labels: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x_train=X, y_train=labels, x_test=X, y_test=labels)
    source = Npz(path=str(path)).load(task)
    assert source.train.labels.tolist() == labels.tolist()
    np.savez(path, x_train=X, y_train=labels[..., None], x_test=X, y_test=labels)
    with pytest.raises(DpfedError, match=r'"regress" needs \[n\], and "multilabel" needs'):
        Npz(path=str(path)).load(task)

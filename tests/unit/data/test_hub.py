"""Data sets of the `datasets` library, with the library if it is installed, else with a fake."""

from __future__ import annotations

import builtins
import sys
import types
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest

from dpfed.data.sources.hub import Hub
from dpfed.errors import DpfedError


class HeadSplit:
    """As much of a datasets.Dataset as is used."""

    def __init__(
        self, columns: dict[str, list[Any]], names: list[str] | None = None, mark: str = "m"
    ) -> None:
        self.columns = columns
        self.column_names = list(columns)
        label = types.SimpleNamespace(names=names) if names else types.SimpleNamespace()
        self.features = dict.fromkeys(columns, label)
        self._fingerprint = mark

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def with_format(self, kind: None) -> HeadSplit:
        return self

    def cast_column(self, column: str, feature: Any) -> HeadSplit:
        return self


def text_split(n: int = 3, names: list[str] | None = None) -> HeadSplit:
    return HeadSplit(
        {
            "sentence": [f"s{i}" for i in range(n)],
            "label": [i % 2 for i in range(n)],
            "user": list("aab")[:n],
        },
        names,
    )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("datasets")
    module.asked = []  # type: ignore[attr-defined]
    module.splits = {"train": text_split(3, ["neg", "pos"]), "test": text_split(2, ["neg", "pos"])}  # type: ignore[attr-defined]

    def load_dataset(name: str, subset: str | None, split: str) -> HeadSplit:
        module.asked.append((name, subset, split))
        return module.splits[split]

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.load_from_disk = lambda name: module.splits  # type: ignore[attr-defined]
    module.disable_progress_bars = lambda: None  # type: ignore[attr-defined]
    module.Image = lambda decode: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_text(library: Any) -> None:
    source = Hub(dataset="org/name", subset="s", text="sentence", client_column="user").load()
    assert library.asked == [("org/name", "s", "train"), ("org/name", "s", "test")]
    assert source.kind == "text"
    assert source.train.inputs["text"].tolist() == ["s0", "s1", "s2"]
    assert source.train.labels.tolist() == [0, 1, 0]
    assert source.classes == ("neg", "pos")
    assert source.declared
    assert source.train.columns["user"].tolist() == ["a", "a", "b"]
    assert source.fingerprint


def test_splits_and_a_second_text(library: Any) -> None:
    library.splits["validation"] = text_split(1)
    source = Hub(
        dataset="d", text="sentence", text_pair="user", test_split="validation", classes=3
    ).load()
    assert source.test.inputs["text_pair"].tolist() == ["a"]
    assert len(source.classes) == 3


def test_names_of_splits_and_a_subset(library: Any) -> None:
    library.splits = {"first": text_split(2), "second": text_split(1)}
    keys: Any = {"dataset": "d", "text": "sentence", "subset": "small"}
    source = Hub(**keys, train_split="first", test_split="second").load()
    assert (len(source.train), len(source.test)) == (2, 1)
    with pytest.raises(DpfedError, match=r"data\.test_split is data\.train_split"):
        Hub(**keys, train_split="first", test_split="first").load()


def test_images(library: Any, tmp_path: Path) -> None:
    (tmp_path / "on_disk.png").write_bytes(makers.image(seed=2))
    cells = [
        {"bytes": makers.image(seed=1), "path": None},
        {"bytes": None, "path": str(tmp_path / "on_disk.png")},
    ]
    library.splits = {
        "train": HeadSplit({"img": cells, "label": [0, 1]}),
        "test": HeadSplit({"img": cells[:1], "label": [1]}),
    }
    for _ in range(2):
        source = Hub(dataset="d", image="img").load()
        assert source.kind == "image"
        assert source.train.inputs["pixel_values"].shape == (2, 3, 6, 6)
        assert np.array_equal(
            source.train.inputs["pixel_values"][0], source.test.inputs["pixel_values"][0]
        )
        assert not source.declared
    assert Hub(dataset="d", image="img", size=4, colour="grey").load().test.inputs[
        "pixel_values"
    ].shape == (1, 1, 4, 4)
    cells[0]["bytes"] = b"damaged"
    library.splits["train"]._fingerprint = "changed"
    with pytest.raises(DpfedError, match=r"row 1 of d \(train\) cannot be read as an image"):
        Hub(dataset="d", image="img").load()
    cells[0] = {"bytes": None, "path": "/nowhere.png"}
    with pytest.raises(DpfedError, match=r"row 1 of d \(train\) has no image"):
        Hub(dataset="d", image="img").load()


def test_a_saved_folder(library: Any, tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert len(Hub(dataset=str(tmp_path), text="sentence").load().train) == 3
    assert library.asked == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "set data.dataset"),
        ({"dataset": "d"}, "exactly one of data.text and data.image"),
        ({"dataset": "d", "text": "a", "image": "b"}, "exactly one of data.text and data.image"),
        (
            {"dataset": "d", "text": "body"},
            r"d \(train\) has no column 'body': set data.text to one of sentence, label",
        ),
        ({"dataset": "d", "image": "img"}, r"d \(train\) has no column 'img': set data.image"),
        ({"dataset": "d", "text": "sentence", "label": "y"}, "has no column 'y': set data.label"),
        (
            {"dataset": "d", "text": "sentence", "test_split": "t"},
            "cannot be loaded with splits 'train' and 't'",
        ),
        ({"dataset": "/no/such/folder", "text": "sentence"}, "there is no folder /no/such/folder"),
        (
            {"dataset": "d", "text": "sentence", "client_column": "w"},
            "has no column 'w': set data.client_column",
        ),
        ({"dataset": "d", "text": "sentence", "test_split": "train"}, "must be other records"),
    ],
)
def test_mistakes_are_one_sentence(library: Any, section: dict[str, Any], words: str) -> None:
    with pytest.raises(DpfedError, match=words):
        Hub(**section).load()


def test_hidden_labels_are_refused(library: Any) -> None:
    library.splits["test"].columns["label"][1] = -1
    with pytest.raises(DpfedError, match=r"row 2 of d \(test\) has label '-1'"):
        Hub(dataset="d", text="sentence").load()


def test_no_network_is_one_sentence(library: Any) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'd' on the Hub\nand a second line")

    library.load_dataset = unreachable
    with pytest.raises(DpfedError, match=r"Couldn't reach 'd' on the Hub") as caught:
        Hub(dataset="d", text="sentence").load()
    assert "\n" not in str(caught.value)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DpfedError, match=r"pip install 'dpfed\[hub\]'"):
        Hub(dataset="d", text="sentence").load()


def test_the_library_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the hub extra is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    makers.write(
        tmp_path / "files", {f"{part}.csv": b"text,label\nx,1\ny,0\n" for part in ("train", "test")}
    )
    assert Hub(dataset=str(tmp_path / "files"), text="text").load().train.inputs[
        "text"
    ].tolist() == ["x", "y"]
    makers.write(tmp_path / "images", makers.image_folder())
    found = Hub(dataset=str(tmp_path / "images"), image="image").load()
    assert found.train.inputs["pixel_values"].shape == (4, 3, 6, 6)
    assert found.classes == ("cat", "dog")
    assert found.declared
    datasets.load_dataset(str(tmp_path / "images")).save_to_disk(str(tmp_path / "saved"))
    saved = Hub(dataset=str(tmp_path / "saved"), image="image").load()
    assert np.array_equal(saved.train.inputs["pixel_values"], found.train.inputs["pixel_values"])
    with pytest.raises(DpfedError, match="cannot be loaded"):
        Hub(dataset="no-such-owner/no-such-set", text="text").load()


def test_several_labels_are_named_by_the_data_set(library: Any) -> None:
    """A list of class numbers: the features of the column state the names."""
    for part, cells in (("train", [[0, 2], [], [1]]), ("test", [[1]])):
        split = HeadSplit({"text": ["a", "b", "c"][: len(cells)], "tags": cells})
        names = types.SimpleNamespace(names=["new", "old", "rare"])
        split.features["tags"] = types.SimpleNamespace(feature=names)
        library.splits[part] = split
    source = Hub(dataset="d", text="text", label="tags").load("multilabel")
    assert source.classes == ("new", "old", "rare")
    assert source.declared
    assert source.train.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_numbers_of_a_data_set(library: Any) -> None:
    for part, stars in (("train", [1.5, 2.0]), ("test", [3.0])):
        library.splits[part] = HeadSplit({"text": ["a", "b"][: len(stars)], "stars": stars})
    source = Hub(dataset="d", text="text", label="stars").load("regress")
    assert source.train.labels.tolist() == [1.5, 2.0]
    assert (source.task, source.classes) == ("regress", ("stars",))

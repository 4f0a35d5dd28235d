"""The forms of data in memory: pairs, records, torch data sets, and one data set per client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpfed.data.memory_columns import client_data, columns_of
from dpfed.data.memory_inputs import unlabelled_inputs
from dpfed.data.sources.in_memory import source_of
from dpfed.errors import DpfedError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.array([0, 1, 0, 1, 0, 1])
FRAME = pandas.DataFrame(X, columns=["a", "b"])
COLUMNS = {"features": X, "label": Y}


class Pairs(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X[i]), int(Y[i])


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.tolist(), Y.tolist()),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (FRAME, pandas.Series(Y)),
        Pairs(),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        [(row, int(label)) for row, label in zip(X, Y, strict=True)],
        [{"features": row, "label": int(label)} for row, label in zip(X, Y, strict=True)],
        {"features": torch.from_numpy(X), "label": torch.from_numpy(Y)},
    ],
    ids=["arrays", "lists", "tensors", "frame", "dataset", "tensor-dataset", "pairs", "records",
         "columns"],
)  # fmt: skip
def test_every_form_of_the_same_records_gives_the_same_source(data: Any) -> None:
    found = source_of(data, {"features": X + 1, "label": Y})
    assert found.kind == "features"
    assert np.array_equal(found.train.inputs["features"], X)
    assert found.train.labels.tolist() == Y.tolist()
    assert found.clients == ()


def test_pairs_of_texts_and_of_images() -> None:
    texts = source_of((["a b", "c"], [0, 1]), (["d", "e"], [0, 1]))
    assert texts.train.inputs["text"].tolist() == ["a b", "c"]
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    images = source_of((list(map(Image.fromarray, pixels)), [0, 1]), (pixels, [0, 1]))
    assert (images.kind, images.white) == ("image", 255.0)
    assert np.array_equal(images.train.inputs["pixel_values"][:, 0], pixels)


def test_decimal_images_are_pixels_if_they_are_called_images() -> None:
    x = np.linspace(0, 1, 32).reshape(2, 1, 4, 4)
    called = source_of({"image": x, "label": [0, 1]}, {"image": x[::-1], "label": [0, 1]})
    assert (called.kind, called.white) == ("image", 1.0)
    assert called.train.inputs["pixel_values"].dtype == np.float32
    plain = source_of((x, [0, 1]), (x[::-1], [0, 1]))
    assert plain.kind == "features"
    assert plain.train.inputs["features"].shape == (2, 1, 4, 4)
    with pytest.raises(DpfedError, match="values of type float32 and test of type uint8"):
        source_of(
            {"image": x, "label": [0, 1]},
            {"image": np.zeros((2, 1, 4, 4), np.uint8), "label": [0, 1]},
        )


@pytest.mark.parametrize("form", [list, dict], ids=["list", "mapping"])
def test_one_data_set_for_each_client(form: type) -> None:
    parts = [(X[:2], Y[:2]), Pairs(), {"features": X[:1], "label": Y[:1]}]
    data = parts[:2] if form is list else dict(zip(["b", "a"], parts, strict=False))
    data = [{"x": X[:2], "label": Y[:2]}, (X, Y)] if form is list else data
    found = source_of(data, (X + 1, Y))
    names = ("client 0", "client 1") if form is list else ("b", "a")
    assert found.clients == names
    assert found.train.columns["client"].tolist() == [names[0]] * 2 + [names[1]] * 6
    assert np.array_equal(found.train.inputs["features"], np.concatenate([X[:2], X]))


def test_texts_of_clients_are_put_together() -> None:
    clients = {"a": {"text": ["x", "y"], "label": ["p", "q"]}, "b": (["z"], ["p"])}
    found = source_of(clients, (["w", "v"], ["p", "q"]))
    assert found.train.inputs["text"].tolist() == ["x", "y", "z"]
    assert found.train.labels.tolist() == [0, 1, 0]


def test_a_single_data_set_has_no_clients() -> None:
    for data in (COLUMNS, (X, Y), FRAME, Pairs(), [{"text": "a", "label": 1}], (FRAME, FRAME["a"])):
        assert client_data(data) == {}
    assert list(client_data([{"text": ["a"], "label": [1]}])) == ["client 0"]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (DataLoader(Pairs()), r"not DataLoader: give its \.dataset"),
        (X, "must be a dictionary of columns"),
        ([3, 4], "must be a dictionary of columns"),
        ({"a": COLUMNS, "b": {"text": ["x"], "label": [0]}}, r"train\['b'\] has the columns text"),
        ([{"features": [1], "label": 0}, {"text": "a", "label": 0}], "record 1 of train has text"),
    ],
)
def test_what_is_no_data_set_is_one_sentence(train: Any, words: str) -> None:
    with pytest.raises(DpfedError, match=words):
        source_of(train, COLUMNS)


def test_the_test_set_is_one_data_set() -> None:
    with pytest.raises(DpfedError, match="the test set is the server's, so give one"):
        source_of(COLUMNS, {"a": (X, Y), "b": (X, Y)})


def test_records_without_labels() -> None:
    for records in (X, X.tolist(), torch.from_numpy(X), FRAME, {"features": X}, (X, Y), COLUMNS):
        inputs, kind = unlabelled_inputs(records)
        assert kind == "features"
        assert np.array_equal(inputs["features"], X)
    for texts in (["a", "b"], [{"text": "a"}, {"text": "b"}], {"text": ["a", "b"]}):
        inputs, kind = unlabelled_inputs(texts)
        assert (inputs["text"].tolist(), kind) == (["a", "b"], "text")


def test_columns_keep_their_values() -> None:
    assert columns_of(FRAME, "train")["a"].tolist() == X[:, 0].tolist()

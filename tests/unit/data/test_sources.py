"""Data sources: what is loaded, and that a bad file is one sentence."""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpfed.data.sources import REGISTRY
from dpfed.data.sources.digits import Digits
from dpfed.data.sources.npz import Npz
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError


def test_the_registry_names_what_there_is() -> None:
    assert REGISTRY["digits"] is Digits
    assert REGISTRY["npz"] is Npz


# ---- digits


def test_digits_have_shape_labels_and_range() -> None:
    source = Digits().load()
    assert len(source.train) + len(source.test) == 1797
    for table in (source.train, source.test):
        x = table.inputs["pixel_values"]
        assert x.dtype == np.uint8
        assert x.shape == (len(table), 1, 8, 8)
        assert x.max() == source.white == 16
        assert sorted(set(table.labels.tolist())) == list(range(10))
        assert table.labels.dtype == np.int64
    assert source.classes == tuple("0123456789")
    assert source.kind == "image"


def test_digits_split_is_disjoint_and_stratified() -> None:
    from sklearn.datasets import load_digits

    source = Digits().load()
    everything = load_digits().images.astype(np.uint8).reshape(1797, -1)
    parts = np.concatenate(
        [t.inputs["pixel_values"].reshape(len(t), -1) for t in (source.train, source.test)]
    )
    assert sorted(map(bytes, parts)) == sorted(map(bytes, everything))  # each record once
    share = np.bincount(source.test.labels) / np.bincount(
        np.concatenate([source.test.labels, source.train.labels])
    )
    assert np.all(np.abs(share - 0.2) < 0.01)


def test_digits_load_the_same_every_time() -> None:
    a, b = Digits().load(), Digits().load()
    assert np.array_equal(a.train.inputs["pixel_values"], b.train.inputs["pixel_values"])
    assert np.array_equal(a.test.labels, b.test.labels)


# ---- npz


def arrays(kind: str = "features", n: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def inputs(count: int) -> np.ndarray:
        if kind == "image":
            return rng.integers(0, 256, (count, 3, 4, 4)).astype(np.uint8)
        return rng.normal(size=(count, 5))

    return {
        "x_train": inputs(n),
        "y_train": np.arange(n) % 3,
        "x_test": inputs(6),
        "y_test": np.arange(6) % 3,
    }


def load(path: Path, parts: dict[str, Any], **section: Any) -> Source:
    np.savez(path / "my.npz", **parts)
    return Npz(path=str(path / "my.npz"), **section).load()


def test_features(tmp_path: Path) -> None:
    parts = arrays()
    source = load(tmp_path, parts)
    assert source.kind == "features"
    assert source.classes == ("0", "1", "2")
    assert source.train.inputs["features"].dtype == np.float32
    np.testing.assert_allclose(source.train.inputs["features"], parts["x_train"], rtol=1e-6)
    assert source.test.labels.tolist() == parts["y_test"].tolist()


def test_images(tmp_path: Path) -> None:
    parts = arrays("image")
    source = load(tmp_path, parts)
    assert source.kind == "image"
    assert source.white == 255
    assert np.array_equal(source.train.inputs["pixel_values"], parts["x_train"])
    assert np.array_equal(source.test.inputs["pixel_values"], parts["x_test"])


def test_columns(tmp_path: Path) -> None:
    hospital = np.array(["a", "b"] * 6)
    source = load(tmp_path, {**arrays(), "train_hospital": hospital, "train_remark": np.array(3.0)})
    assert source.train.column("hospital") is not None
    assert np.array_equal(source.train.columns["hospital"], hospital)
    assert list(source.train.columns) == ["hospital"]  # a single number is no column, and no crash
    assert source.train.column(None) is None
    with pytest.raises(DpfedError, match=r"no column 'patient'.*hospital"):
        source.train.column("patient")


@pytest.mark.parametrize("shape", [(11,), (12, 2), ()])
@pytest.mark.parametrize("use", ["client_column", "unit_column"])
def test_a_column_that_does_not_fit_is_refused_when_it_is_used(
    tmp_path: Path, shape: tuple[int, ...], use: str
) -> None:
    parts = {**arrays(), "train_patient": np.zeros(shape, dtype=int)}
    with pytest.raises(DpfedError, match=r"train_patient .* has shape"):
        load(tmp_path, parts, **{use: "patient"})


@pytest.mark.parametrize("name", ["x_train", "y_train", "x_test", "y_test"])
def test_a_missing_array_is_named(tmp_path: Path, name: str) -> None:
    parts = arrays()
    del parts[name]
    with pytest.raises(DpfedError, match=f"has no array {name}"):
        load(tmp_path, parts)


BAD: dict[str, dict[str, Any]] = {
    "labels longer than inputs": {"y_train": np.zeros(13, dtype=int)},
    "labels shorter than inputs": {"y_test": np.zeros(5, dtype=int)},
    "negative label": {"y_train": np.array([-1] + [0] * 11)},
    "label beyond any number of classes": {"y_train": np.array([2**40] + [0] * 11)},
    "label beyond 63 bits": {"y_train": np.array([2**64 - 1] + [0] * 11, dtype=np.uint64)},
    "labels that are not whole": {"y_train": np.zeros(12)},
    "labels that are true and false": {"y_train": np.zeros(12, dtype=bool)},
    "labels of two dimensions": {"y_train": np.zeros((12, 1), dtype=int)},
    "no labels": {"y_train": np.zeros(0, dtype=int), "x_train": np.zeros((0, 5))},
    "no test records": {"y_test": np.zeros(0, dtype=int), "x_test": np.zeros((0, 5))},
    "a number for inputs": {"x_train": np.array(1.0)},
    "inputs of whole numbers": {"x_train": np.zeros((12, 5), dtype=int)},
    "images of floats": {"x_train": np.zeros((12, 3, 4, 4))},
    "images without channels": {"x_train": np.zeros((12, 4, 4), dtype=np.uint8)},
    "records without numbers": {"x_train": np.zeros((12, 0)), "x_test": np.zeros((6, 0))},
    "text": {"x_train": np.array([["a"] * 5] * 12)},
    "complex numbers": {"x_train": np.zeros((12, 5), dtype=complex)},
    "other width in the test set": {"x_test": np.zeros((6, 4))},
    "other kind in the test set": {"x_test": np.zeros((6, 3, 4, 4), dtype=np.uint8)},
    "objects": {"y_train": np.array([{"a": 1}] * 12, dtype=object)},
    "objects for inputs": {"x_train": np.array([[None] * 5] * 12, dtype=object)},
    "nan in a training record": {"x_train": np.where(np.eye(12, 5), np.nan, 0.0)},
    "infinity in a test record": {"x_test": np.where(np.eye(6, 5), np.inf, 0.0)},
    "beyond single precision": {"x_train": np.full((12, 5), 1e200)},
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bad_arrays_are_one_sentence(tmp_path: Path, case: str) -> None:
    with pytest.raises(DpfedError) as error:
        load(tmp_path, {**arrays(), **BAD[case]})
    assert "\n" not in str(error.value)


def test_test_images_are_not_wrapped_around(tmp_path: Path) -> None:
    """Floats of 0..1, or 16-bit pixels, would become other pictures if they were cast to 8 bits."""
    for other in (np.full((6, 3, 4, 4), 0.5), np.full((6, 3, 4, 4), 300, dtype=np.uint16)):
        with pytest.raises(DpfedError, match="x_test"):
            load(tmp_path, {**arrays("image"), "x_test": other})


def test_a_non_finite_feature_names_its_row(tmp_path: Path) -> None:
    x = np.zeros((12, 5))
    x[7, 2] = np.nan
    with pytest.raises(DpfedError, match="row 7 of x_train"):
        load(tmp_path, {**arrays(), "x_train": x})


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    for extra in (
        {"y_train": np.array([Bomb()] * 12, dtype=object)},
        {"train_note": np.array([Bomb()], dtype=object)},
    ):
        np.savez(tmp_path / "bomb.npz", **{**arrays(), **extra})
        with pytest.raises(DpfedError):
            Npz(path=str(tmp_path / "bomb.npz")).load()
    assert not marker.exists()


def test_a_path_that_is_not_an_archive(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"data\.path"):
        Npz().load()
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.npz").write_text("x_train,y_train\n1,2\n")
    for name in ("absent.npz", ".", "one.npy", "empty.npz", "text.npz", "nul\0.npz"):
        with pytest.raises(DpfedError):
            Npz(path=str(tmp_path / name)).load()


def refused_or_loaded(path: Path) -> None:
    """Whatever the bytes, the only complaint is a sentence."""
    with contextlib.suppress(DpfedError):
        Npz(path=str(path)).load()


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY\x01\x00"]),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_is_refused(tmp_path: Path, data: bytes, magic: bytes) -> None:
    path = tmp_path / "garbage.npz"
    path.write_bytes(magic + data)
    refused_or_loaded(path)


@given(
    st.booleans(),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
)
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_archive_is_refused(
    tmp_path: Path, packed: bool, cut: int, flips: list[tuple[int, int]]
) -> None:
    buffer = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(buffer, **arrays())
    data = bytearray(buffer.getvalue())
    for place, value in flips:
        data[place % len(data)] = value
    path = tmp_path / "damaged.npz"
    path.write_bytes(bytes(data[: len(data) - cut % len(data)] if cut % 3 == 0 else data))
    refused_or_loaded(path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999, 99999999), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 5), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (12, 5), }",
        "__import__('os').abort()",
        "{" * 500,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "lies.npz"
    text = (header + "\n").encode()
    np.savez(path, **{k: v for k, v in arrays().items() if k != "x_train"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(
            "x_train.npy",
            b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 480,
        )
    with pytest.raises(DpfedError):
        Npz(path=str(path)).load()


# ---- tables


def table(n: int, label: int = 0) -> Table:
    return Table({"features": np.zeros((n, 2), dtype=np.float32)}, np.full(n, label))


def test_a_source_checks_its_tables() -> None:
    Source(table(3), table(2), ("a",), "features")
    with pytest.raises(DpfedError, match="training set has no records"):
        Source(table(0), table(2), ("a",), "features")
    with pytest.raises(DpfedError, match="test set has no records"):
        Source(table(3), table(0), ("a",), "features")
    with pytest.raises(
        DpfedError, match=r"record 0 of the test set has label 1; labels are 0 to 0"
    ):
        Source(table(3), table(2, label=1), ("a",), "features")
    with pytest.raises(DpfedError, match="4 rows of features and 3 labels"):
        Source(
            Table({"features": np.zeros((4, 2))}, np.zeros(3, dtype=int)),
            table(2),
            ("a",),
            "features",
        )

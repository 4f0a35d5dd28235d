"""CIFAR in every published form, and what is said about files that are not it."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest

from dpfed.data.sources import cifar
from dpfed.data.sources.cifar import Cifar10, Cifar100
from dpfed.errors import DpfedError

FORMS = {
    "bin": ("cifar-10-batches-bin", makers.cifar10_binary),
    "py": ("cifar-10-batches-py", makers.cifar10_pickle),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", ["folder", "parent", "archive", "archive's folder"])
def test_every_form_gives_the_same_images(tmp_path: Path, form: str, given: str) -> None:
    folder, make = FORMS[form]
    name = {"bin": "cifar-10-binary.tar.gz", "py": "cifar-10-python.tar.gz"}[form]
    path = {
        "folder": lambda: makers.write(tmp_path / folder, make()),
        "parent": lambda: makers.write(tmp_path / folder, make()).parent,
        "archive": lambda: makers.tar(tmp_path / "renamed.tar.gz", make(), folder),
        "archive's folder": lambda: makers.tar(tmp_path / name, make(), folder).parent,
    }[given]()
    for _ in range(2):  # built, then from the cache
        source = Cifar10(path=str(path), check=False).load()
        batches = [makers.cifar10_images(i) for i in range(6)]
        x = np.concatenate([b[0] for b in batches[:5]]).reshape(-1, 3, 32, 32)
        assert np.array_equal(source.train.inputs["pixel_values"], x)
        assert source.train.inputs["pixel_values"].dtype == np.uint8
        assert source.train.labels.tolist() == [y for b in batches[:5] for y in b[1].tolist()]
        assert np.array_equal(
            source.test.inputs["pixel_values"], batches[5][0].reshape(-1, 3, 32, 32)
        )
        assert source.test.labels.tolist() == batches[5][1].tolist()
        assert source.classes == tuple(f"class{i}" for i in range(10))
        assert source.kind == "image"
        assert source.declared
        assert len(source.fingerprint) == 64


def test_red_comes_first_row_by_row(tmp_path: Path) -> None:
    record = bytes([7]) + bytes(range(256)) * 12
    files = {name: record for name in makers.cifar10_binary() if name.endswith(".bin")}
    source = Cifar10(path=str(makers.write(tmp_path / "c", files)), check=False).load()
    pixels = source.test.inputs["pixel_values"][0]
    assert pixels[0, 0, 31] == 31
    assert pixels[0, 1, 0] == 32
    assert pixels[1, 0, 0] == 0
    assert source.test.labels[0] == 7
    assert source.classes[7] == "horse"  # without a file of names: the official ones


@pytest.mark.parametrize("make", [makers.cifar100_binary, makers.cifar100_pickle])
def test_cifar100(tmp_path: Path, make: Any) -> None:
    path = str(makers.write(tmp_path / "c", make()))
    for label in ("fine", "coarse"):  # one after the other, so that the cache must tell them apart
        source = Cifar100(path=path, check=False, label=label).load()
        for part in ("train", "test"):
            x, fine, coarse = makers.cifar100_images(part)
            table = getattr(source, part)
            assert np.array_equal(table.inputs["pixel_values"], x.reshape(-1, 3, 32, 32))
            assert table.labels.tolist() == (fine if label == "fine" else coarse).tolist()
        assert len(source.classes) == len(set(source.classes)) == (100 if label == "fine" else 20)


def test_published_counts_are_asked_for(tmp_path: Path) -> None:
    path = makers.write(tmp_path / "cifar-10-batches-bin", makers.cifar10_binary())
    Cifar10(path=str(path), check=False).load()
    with pytest.raises(
        DpfedError,
        match=r"data_batch_1.bin has 3 records, the published set 10,000.*data.check = false",
    ):
        Cifar10(path=str(path)).load()  # also not from what the looser setting has cached


def test_an_archive_must_have_the_published_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = makers.tar(tmp_path / "a.tar.gz", makers.cifar10_binary(), "cifar-10-batches-bin")
    with pytest.raises(
        DpfedError,
        match=r"has md5 [0-9a-f]{32}, the published file c32a1d4ab5d03f1284b67883e8d87530",
    ):
        Cifar10(path=str(path)).load()
    monkeypatch.setattr(cifar, "check_md5", lambda *a: None)
    with pytest.raises(DpfedError, match="3 records"):
        Cifar10(path=str(path)).load()


def test_published_checksums() -> None:
    known = [one.md5 for one in (*cifar.cifar10_layouts(), *cifar.cifar100_layouts("fine"))]
    assert len(set(known)) == 4
    assert all(len(md5) == len(hashlib.md5(b"").hexdigest()) for md5 in known)


@pytest.mark.parametrize("cls", [Cifar10, Cifar100])
def test_missing_files_say_where_they_are(tmp_path: Path, cls: Any) -> None:
    for path in (None, str(tmp_path / "nothing"), str(tmp_path)):
        with pytest.raises(
            DpfedError, match=r"https://www.cs.toronto.edu/~kriz/cifar-10.*data.path"
        ):
            cls(path=path).load()


def load10(
    tmp_path: Path, change: dict[str, bytes | None], make: Any = makers.cifar10_binary
) -> None:
    files = {name: data for name, data in {**make(), **change}.items() if data is not None}
    Cifar10(path=str(makers.write(tmp_path / "c", files)), check=False).load()


def batch(**content: Any) -> bytes:
    return pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], **content}, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (batch(labels=[0, 10]), "record 1 of .*data_batch_3 has label 10; labels are 0 to 9"),
        (batch(labels=[0]), "data_batch_3 has 2 images and 1 labels"),
        (batch(labels=["a", 1]), "no list of labels"),
        (batch(labels=[]), "no list of labels"),
        (batch(labels=[0, 2**70]), "no list of labels"),
        (batch(labels=None), "no list of labels"),
        (batch(data=np.zeros((2, 3071), np.uint8)), "no images of 3072 bytes"),
        (batch(data=np.zeros((2, 3072), np.int32)), "no images of 3072 bytes"),
        (batch(data=[1, 2]), "no images of 3072 bytes"),
        (pickle.dumps([1], 2), "not a pickle of named arrays"),
        (batch()[:-200], "data_batch_3 is not a pickle of arrays and lists"),
        (b"", "not a pickle"),
        (b"cos\nsystem\n(S'true'\ntR.", "os.system, which is code and not data"),
    ],
)
def test_a_bad_pickle_is_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(DpfedError, match=words) as caught:
        load10(tmp_path, {"data_batch_3": data}, makers.cifar10_pickle)
    assert "data_batch_3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malicious_archive_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(trace), "w")

    for name in ("data_batch_1", "test_batch", "batches.meta"):
        files = {
            **makers.cifar10_pickle(),
            name: pickle.dumps({"data": Evil(), "labels": [1], "label_names": Evil()}, 2),
        }
        path = makers.tar(tmp_path / "a.tar.gz", files, "../../etc")
        with pytest.raises(
            DpfedError, match=rf"{name} is not a pickle of arrays and lists: .*open, which is code"
        ):
            Cifar10(path=str(path), check=False).load()
    assert not trace.exists()


def test_nothing_leaves_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    makers.tar(path, {"../../escaped": b"x", **makers.cifar10_binary()}, "../..")
    before = {p for p in tmp_path.rglob("*") if "cache" not in p.parts}
    Cifar10(path=str(path), check=False).load()
    assert {
        p for p in tmp_path.rglob("*") if "cache" not in p.relative_to(tmp_path).parts
    } == before
    assert not (tmp_path.parent / "escaped").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"data_batch_2.bin": makers.cifar10_binary()["data_batch_2.bin"][:-1]},
            "data_batch_2.bin ends inside record 2",
        ),
        ({"data_batch_2.bin": b""}, "data_batch_2.bin ends inside record 0"),
        ({"data_batch_2.bin": None}, "has no data_batch_2.bin"),
        (
            {"test_batch.bin": bytes([10]) + bytes(3072)},
            "record 0 of .*test_batch.bin has label 10",
        ),
        ({"batches.meta.txt": b"cat\n"}, "batches.meta.txt does not name 10 classes"),
        ({"batches.meta.txt": b"\xff\n"}, "line 1 of .*batches.meta.txt is not UTF-8"),
    ],
)
def test_a_bad_binary_is_one_sentence(
    tmp_path: Path, own_cache: Path, change: Any, words: str
) -> None:
    with pytest.raises(DpfedError, match=words):
        load10(tmp_path, change)
    assert not own_cache.exists() or list(own_cache.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize("cut", [0, 10, 500, -20, -9])
def test_a_truncated_archive_is_one_sentence(tmp_path: Path, cut: int) -> None:
    path = makers.tar(tmp_path / "a.tar.gz", makers.cifar10_binary(), "c")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DpfedError, match=r"a\.tar\.gz"):
        Cifar10(path=str(path), check=False).load()


def test_a_pickle_that_is_not_the_published_one_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "loads", lambda data: pytest.fail("the pickle was opened"))
    folder = makers.write(tmp_path / "c", makers.cifar10_pickle())
    with pytest.raises(
        DpfedError,
        match=r"data_batch_1 has md5 .*c99cafc152244af753f735de768cd75f.*data.check = false",
    ):
        Cifar10(path=str(folder)).load()

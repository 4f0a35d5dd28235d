"""Files changed at random: whatever is in them, only a sentence comes out, or a data set that is whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import makers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.data.sources.cifar import Cifar10, Cifar100
from dpfed.data.sources.glue import Mnli, Qqp, Sst2
from dpfed.data.sources.image_folder import ImageFolder
from dpfed.data.sources.mnist import Mnist
from dpfed.data.sources.text_table import TextTable
from dpfed.data.sources.tiny_imagenet import TinyImagenet
from dpfed.errors import DpfedError

EXAMPLES = int(os.environ.get("DPFED_FUZZ_EXAMPLES", "12"))
Files = dict[str, bytes]


def archive(make: Callable[[], Files]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        return {"a.tar.gz": makers.tar(Path(folder) / "a.tar.gz", make(), "root").read_bytes()}


def zip_of(files: Files) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        return {"a.zip": makers.zipped(Path(folder) / "a.zip", files, "root/").read_bytes()}


CSV = {"t.csv": b'text,label,site\n"a ""b""",0,x\nc,1,y\n', "test.csv": b"text,label\nd,1\n"}
JSONL = {
    "t.jsonl": b'{"text": "a", "label": 0}\n{"text": "b", "label": "1"}\n',
    "test.csv": CSV["test.csv"],
}
CASES: dict[str, tuple[Files, Callable[[str], Any]]] = {
    "cifar10 binary": (makers.cifar10_binary(), lambda p: Cifar10(path=p, check=False)),
    "cifar10 pickle": (makers.cifar10_pickle(), lambda p: Cifar10(path=p, check=False)),
    "cifar10 archive": (
        archive(makers.cifar10_binary),
        lambda p: Cifar10(path=f"{p}/a.tar.gz", check=False),
    ),
    "cifar100 pickle": (makers.cifar100_pickle(), lambda p: Cifar100(path=p, check=False)),
    "mnist": (makers.mnist(), lambda p: Mnist(path=p, check=False)),
    "mnist plain": (makers.mnist(compress=False), lambda p: Mnist(path=p, check=False)),
    "tiny-imagenet": (makers.tiny_imagenet(), lambda p: TinyImagenet(path=p, check=False)),
    "tiny-imagenet zip": (
        zip_of(makers.tiny_imagenet()),
        lambda p: TinyImagenet(path=f"{p}/a.zip", check=False),
    ),
    "sst2": (makers.glue("sst2"), lambda p: Sst2(path=p, check=False)),
    "qqp": (makers.glue("qqp"), lambda p: Qqp(path=p, check=False)),
    "mnli": (makers.glue("mnli"), lambda p: Mnli(path=p, check=False)),
    "image folder": (makers.image_folder(), lambda p: ImageFolder(path=p, size=5)),
    "csv": (CSV, lambda p: TextTable(path=f"{p}/t.csv", test_path=f"{p}/test.csv")),
    "jsonl": (JSONL, lambda p: TextTable(path=f"{p}/t.jsonl", test_path=f"{p}/test.csv")),
}


def spoil(data: st.DataObject, content: bytes) -> bytes:
    how = data.draw(st.sampled_from(["cut", "random", "bytes", "insert", "repeat"]))
    if how == "random":
        return data.draw(st.binary(max_size=200))
    at = data.draw(st.integers(0, max(len(content) - 1, 0)))
    if how == "cut":
        return content[:at]
    if how == "insert":
        return content[:at] + data.draw(st.binary(min_size=1, max_size=8)) + content[at:]
    if how == "repeat":
        return content + content[at:]
    out = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(out) - 1, 400)) | st.integers(0, len(out) - 1))
        out[place] = data.draw(st.integers(0, 255))
    return bytes(out)


@pytest.mark.parametrize("case", CASES)
def test_only_a_sentence_comes_out(case: str) -> None:
    files, section = CASES[case]

    @settings(max_examples=EXAMPLES, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(files)))
        with tempfile.TemporaryDirectory() as folder:
            makers.write(Path(folder), {**files, name: spoil(data, files[name])})
            source, sentence = None, ""
            try:
                source = section(folder).load()
            except DpfedError as error:
                sentence = str(error)
            if source is None:
                assert sentence
                assert "\n" not in sentence
            else:
                assert len(source.train) > 0
                assert source.train.labels.max() < len(source.classes)

    check()

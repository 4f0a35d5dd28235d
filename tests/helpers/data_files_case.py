"""Small files in the official layouts of data sets, with the source that reads each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import makers

from dpfed.data.sources.cifar import Cifar10, Cifar100
from dpfed.data.sources.glue import Mnli, Qqp, Sst2
from dpfed.data.sources.image_folder import ImageFolder
from dpfed.data.sources.mnist import Mnist
from dpfed.data.sources.text_table import TextTable
from dpfed.data.sources.tiny_imagenet import TinyImagenet

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

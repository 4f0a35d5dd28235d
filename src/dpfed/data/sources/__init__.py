"""Data sources by name. A source is a dataclass of `[data]` keys, with a method `load()`."""

from __future__ import annotations

from dpfed.config import DataSection
from dpfed.data.sources.cifar import Cifar10, Cifar100
from dpfed.data.sources.digits import Digits
from dpfed.data.sources.glue import Mnli, Qnli, Qqp, Rte, Sst2
from dpfed.data.sources.hub import Hub
from dpfed.data.sources.image_folder import ImageFolder
from dpfed.data.sources.in_memory import InMemory
from dpfed.data.sources.mnist import FashionMnist, Mnist
from dpfed.data.sources.npz import Npz
from dpfed.data.sources.text_table import TextTable
from dpfed.data.sources.tiny_imagenet import TinyImagenet

SOURCES = (
    Digits,
    Npz,
    Mnist,
    FashionMnist,
    Cifar10,
    Cifar100,
    TinyImagenet,
    ImageFolder,
    Sst2,
    Qqp,
    Qnli,
    Mnli,
    Rte,
    TextTable,
    Hub,
    InMemory,
)
REGISTRY: dict[str, type[DataSection]] = {cls.name: cls for cls in SOURCES}

"""One file per data set family. A source is a `[data]` section with a `load()`; it is listed here by name."""

from __future__ import annotations

from dpfed.config import DataSection
from dpfed.data.sources.digits import Digits
from dpfed.data.sources.npz import Npz

REGISTRY: dict[str, type[DataSection]] = {cls.name: cls for cls in (Digits, Npz)}

"""Hash of the data and the model that a program holds in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.data.tables import Source


def identity_of(model: Any, source: Source) -> str:
    """Return a hash that changes with any record, label, class name or weight."""
    hash = hashlib.sha256(repr((source.kind, source.classes, source.white)).encode())
    for table in (source.train, source.test):
        arrays = {**table.inputs, "labels": table.labels, **table.columns}
        for name, array in sorted(arrays.items()):
            _add(hash, name, array)
    if isinstance(model, str | Path):
        hash.update(str(model).encode())
    elif hasattr(model, "state_dict"):
        hash.update(repr(model).encode())
        for name, tensor in model.state_dict().items():
            _add(hash, name, tensor.detach().cpu().float().numpy())
    return hash.hexdigest()[:16]


def _add(hash: Any, name: str, array: np.ndarray) -> None:
    hash.update(repr((name, array.dtype.str, array.shape)).encode())
    if array.dtype == object:
        # Python strings have no bytes of their own in an array.
        hash.update(repr(array.tolist()).encode())
    else:
        hash.update(np.ascontiguousarray(array).tobytes())

"""Measure the memory of tensors that a computation creates, on any device and without a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, measure the peak memory of the tensors that PyTorch operators create.

    Memory is counted in bytes. Tensors that existed before, such as a model's weights, are not
    counted. Memory that a single operator uses only internally is not counted either.

    bytes  memory of the counted tensors that are alive now
    peak   largest value of `bytes` so far
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0
        self.peak: int = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            self._count_storage(x, new=False)
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            self._count_storage(x, new=True)
        self.peak = max(self.peak, self.bytes)
        return out

    def _count_storage(self, x: Any, new: bool) -> None:
        """Add the memory of the tensor `x` to `bytes`, and subtract it when this memory is freed.

        Memory that several tensors share is counted once.

        new  True for a result of an operator, False for an argument. An argument that is not
             counted yet existed before this context, so it counts as 0 bytes.
        """
        # A quantising library's tensor consists of several inner tensors and has no memory of its
        # own.
        if not isinstance(x, Tensor) or hasattr(x, "__tensor_flatten__"):
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0
        self.bytes += size
        self._known[key] = weakref.finalize(storage, self._delete, key, size)

    def _delete(self, key: int, size: int) -> None:
        del self._known[key]
        self.bytes -= size


def peak_bytes(compute: Any) -> int:
    """Return the largest memory, in bytes, that new tensors use together while `compute()` runs."""
    memory = PeakMemory()
    with memory, torch.autograd.set_multithreading_enabled(False):
        compute()
    return memory.peak

"""Our Triton kernels, and where they are used: on a GPU on which triton works. Elsewhere torch's own operations do the same.

    dropout  dropout by a record's key
    lora     the thin products of LoRA with weights of each sample's own
    norm     layer normalisation with frozen weights
    patches  what a convolution sees of images, and the way back
    rows     norms of gradients, and rows that do not count
    windows  attention within Swin's windows, and of small BERTs

triton comes with torch for GPUs. It builds its kernels when they are first called and needs a C compiler for that, so
whether it works is found by trying. `DPFED_KERNELS=0` in the environment does without.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger("dpfed")
TRITON = importlib.util.find_spec("triton") is not None
interpreted = False  # set by tests: kernels on the CPU, by triton's interpreter


def usable(x: Tensor) -> bool:
    """Whether kernels run where this tensor is; inside vmap and in double precision they do not. The first call on a device
    tries them, so it must come before any capture."""
    if (
        torch._C._are_functorch_transforms_active()
    ):  # asked first: kernels cannot be tried there either
        return False
    if x.dtype == torch.float64:
        return False
    if interpreted or not x.is_cuda:
        return interpreted
    if x.device not in _ASKED and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be tried now
    found = works(x.device)
    _ASKED.add(x.device)  # only now: another thread may be capturing while they are tried
    return found


_ASKED: set[torch.device] = set()


@functools.cache
def works(device: torch.device) -> bool:
    """Whether kernels can be built for the device and give the numbers of torch's own operations there."""
    if os.environ.get("DPFED_KERNELS") == "0":
        return False
    if device.type == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return False

    def right() -> bool:
        from dpfed.accel import dropout, lora, norm

        return lora.right(device) and norm.right(device) and dropout.right(device)

    return seen_right("kernels", device, right)


def seen_right(which: str, device: torch.device, right: Callable[[], bool]) -> bool:
    """Whether these kernels give the numbers they should; where they do not, or cannot be built, a warning says so.

    They are tried in a thread of their own, as they may be asked for where no gradients can be taken. `right` takes none on
    a GPU: in a backward pass torch's thread for those is the one that asks, and waits.
    """
    try:
        with ThreadPoolExecutor(1) as own:
            good = own.submit(right).result()
        if good:
            return True
        reason = "they give other numbers"
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # no triton, no compiler, a GPU that it does not know: none of them is worth a run
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    LOG.warning(
        "%s are not used on %s, so steps take longer than they could: %s", which, device, reason
    )
    return False


def alike(found: Tensor, wanted: Tensor) -> bool:
    """The same but for the rounding of half precision."""
    return bool((found.double() - wanted).norm() <= 0.02 * wanted.norm())


def on(x: Tensor) -> AbstractContextManager[Any]:
    """A thread's current device need not be that of the tensors, and kernels are started on the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def places(
    shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    """How many patches a convolution sees of images `[..., H, W]`, down and across."""
    down = (shape[-2] + 2 * padding[0] - kernel[0]) // stride[0] + 1
    across = (shape[-1] + 2 * padding[1] - kernel[1]) // stride[1] + 1
    if min(down, across) < 1:
        raise ValueError(
            f"a kernel of {kernel[0]} x {kernel[1]} does not fit images of {shape[-2]} x {shape[-1]}"
        )
    return down, across

"""GPU kernels in Triton, and the switch between them and plain PyTorch.

accel/NAME.py            the kernels; importing one of these modules needs triton
accel/operators/NAME.py  the operators that other packages call, each with its plain path

The switch is `usable`. It returns False without a GPU, without triton and with `DPFED_KERNELS=0`.
Before the first use on a device, `right` compares a module's kernels with their plain equivalents.
Kernels that fail to build or differ are not used: a warning says so, and the plain path runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger("dpfed")
TRITON = importlib.util.find_spec("triton") is not None
# The types that kernels take.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The kernels that `works` checks for all types at once; others have a check for each type.
ALWAYS_CHECKED = ("lora", "norm", "dropout")
# Tests set this to run kernels on the CPU in triton's interpreter.
interpreted = False
# Devices, and (kernels, device, type), for which the answer is known.
_tried: set[object] = set()


def usable(x: Tensor) -> bool:
    """Return True if kernels run on the device of `x`, in its precision and outside vmap.

    The first call on a device tries the kernels, so it must come before any CUDA graph capture.
    """
    # Inside vmap the kernels cannot be tried either, so this test comes first.
    if torch._C._are_functorch_transforms_active() or x.dtype == torch.float64:
        return False
    if interpreted or not x.is_cuda:
        return interpreted
    if x.device not in _tried and torch.cuda.is_current_stream_capturing():
        return False
    found = works(x.device)
    # Another thread may capture while the kernels are tried: only now the answer is known.
    _tried.add(x.device)
    return found


@functools.cache
def works(device: torch.device) -> bool:
    """Return True if kernels build on the device and agree with plain operations there."""
    if os.environ.get("DPFED_KERNELS") == "0":
        return False
    if device.type == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return False
    return seen_right(
        "kernels", device, lambda: all(_module(name).right(device) for name in ALWAYS_CHECKED)
    )


def _module(name: str) -> ModuleType:
    return import_module(f"dpfed.accel.{name}")


def kernels_for(name: str, x: Tensor) -> ModuleType | None:
    """Return the module `accel.<name>` if its kernels passed their check for tensors like `x`."""
    if not usable(x):
        return None
    if name in ALWAYS_CHECKED:
        return _module(name)
    key = (name, x.device, x.dtype)
    if key not in _tried and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    found = _checked_kernels(*key)
    _tried.add(key)
    return found


@functools.cache
def _checked_kernels(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    kernels = _module(name)
    if dtype not in FLOATS:
        return None
    good = seen_right(kernels.TITLE, device, lambda: kernels.right(device, dtype))
    return kernels if good else None


def seen_right(which: str, device: torch.device, right: Callable[[], bool]) -> bool:
    """Return the result of the check `right`; log a warning if it is False or raises.

    The check runs in its own thread, because the caller may be in a mode without gradients.
    It must not take gradients on a GPU: the calling thread may be the one that computes them.
    """
    try:
        with ThreadPoolExecutor(1) as pool:
            if pool.submit(right).result():
                return True
        reason = "they give other numbers"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # No triton, no compiler or an unknown GPU: a run continues on the plain path.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    LOG.warning(
        "%s are not used on %s, so steps take longer than they could: %s", which, device, reason
    )
    return False


def nearly_equal(found: Tensor, wanted: Tensor) -> bool:
    """Return True if `found` equals the float64 tensor `wanted` up to half-precision rounding."""
    return bool((found.double() - wanted).norm() <= 0.02 * wanted.norm())


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the GPU of `x` current: Triton starts kernels on the thread's current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()

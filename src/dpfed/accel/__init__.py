"""GPU kernels in Triton, and the switch between these kernels and plain PyTorch.

accel/NAME.py            the kernels; importing one of these modules needs triton
accel/operators/NAME.py  the operators that other packages call and that start the kernels

The switch is the function `usable`. It returns False without a GPU, without triton and with the
environment variable `DPFED_KERNELS=0`. Each module of kernels has a function `right`, which returns
True if the kernels and plain PyTorch give equal results. dpfed calls it before it uses the kernels
on a device for the first time. If kernels fail to build or give wrong numbers, a warning says so
and plain PyTorch runs instead.
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

from dpfed.errors import reason

LOG = logging.getLogger("dpfed")
TRITON = importlib.util.find_spec("triton") is not None
# The dtypes of tensors that the kernels accept.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# `works` checks the kernels of these modules together, for all dtypes. `kernels_for` checks any
# other module when it is first needed, separately for each dtype.
ALWAYS_CHECKED = ("lora", "norm", "dropout")
# Tests set this to True to run the kernels on the CPU in triton's interpreter.
interpreted = False
# Devices, and triples (module, device, dtype), whose kernels were already checked, successfully or
# not.
_tried: set[object] = set()


def usable(x: Tensor) -> bool:
    """Return True if the kernels can be used for the device and dtype of `x` at this moment.

    The result is False inside `torch.vmap`. The first call on a device checks the kernels, which is
    impossible during a CUDA graph capture. For an unchecked device the result is then False.
    """
    # Test for vmap before `works` is called, because the check of the kernels fails inside vmap.
    if torch._C._are_functorch_transforms_active() or x.dtype == torch.float64:
        return False
    if interpreted or not x.is_cuda:
        return interpreted
    if x.device not in _tried and torch.cuda.is_current_stream_capturing():
        return False
    found = works(x.device)
    # Add the device only after `works` has stored its result. Otherwise another thread could call
    # `works` while it captures a CUDA graph, and the check would break the capture.
    _tried.add(x.device)
    return found


@functools.cache
def works(device: torch.device) -> bool:
    """Return True if the kernels build on this device and agree with plain PyTorch there."""
    if os.environ.get("DPFED_KERNELS") == "0":
        return False
    if device.type == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return False
    return passes_check(
        "kernels", device, lambda: all(_module(name).right(device) for name in ALWAYS_CHECKED)
    )


def _module(name: str) -> ModuleType:
    return import_module(f"dpfed.accel.{name}")


def kernels_for(name: str, x: Tensor) -> ModuleType | None:
    """Return the module `accel.<name>` if its kernels can be used for `x`, else None.

    The first call for a device and a dtype checks the kernels. During a CUDA graph capture the
    check is impossible, so the result for unchecked kernels is then None.
    """
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
    good = passes_check(kernels.TITLE, device, lambda: kernels.right(device, dtype))
    return kernels if good else None


def passes_check(which: str, device: torch.device, right: Callable[[], bool]) -> bool:
    """Check the kernels named `which` on `device` by calling `right`, and return the result.

    If `right` returns False or raises an error, log a warning and return False. Only an
    out-of-memory error is raised again.

    `right` runs in a new thread, because the caller may have switched gradients off in its own
    thread. `right` must not compute gradients on a GPU. PyTorch computes those in one thread per
    GPU, and that thread may be the caller, which would then wait for itself: a deadlock.
    """
    try:
        with ThreadPoolExecutor(1) as pool:
            if pool.submit(right).result():
                return True
        failure = "they give other numbers"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Do not raise the error. Without triton or a compiler, or on an unknown GPU, plain PyTorch
        # runs instead of the kernels.
        failure = reason(error)
    LOG.warning(
        "%s are not used on %s, so steps take longer than they could: %s", which, device, failure
    )
    return False


def nearly_equal(found: Tensor, wanted: Tensor) -> bool:
    """Return True if a kernel's result `found` differs from the exact `wanted` by at most 2 %.

    The norm of the difference is compared with the norm of `wanted`, which is float64. Rounding to
    half precision causes smaller differences than 2 %.
    """
    return bool((found.double() - wanted).norm() <= 0.02 * wanted.norm())


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that makes the GPU of `x` the current GPU; on a CPU it does nothing.

    Triton starts kernels on the current GPU.
    """
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()

"""Choose the device and the number of CPU threads that torch computes with."""

from __future__ import annotations

import torch

from dpfed.errors import DpfedError

# Models with fewer parameters use one CPU thread, because more threads would cost more time than
# they save.
SMALL_MODEL = 1_000_000
# The number of CPU threads before `set_threads` changed it to one; empty until then.
_threads_before: list[int] = []


def device_of(name: str) -> torch.device:
    """Return the torch device for a value of `run.device`, such as "auto", with TF32 turned off."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DpfedError(
            f"run.device = {name!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None
    disable_tf32(device)
    return device


def disable_tf32(device: torch.device) -> None:
    """Make GPUs multiply matrices in full float32 instead of the less exact format TF32.

    With TF32, the norm of a clipped gradient could exceed the clip norm.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def set_threads(threads: int | str, parameters: int) -> None:
    """Set the number of CPU threads of this process for a model with `parameters` parameters.

    With "auto", a small model gets one thread. A later large model in the same process gets the
    original number of threads again.
    """
    now = torch.get_num_threads()
    if threads != "auto":
        torch.set_num_threads(int(threads))
    elif parameters < SMALL_MODEL:
        if now > 1:
            _threads_before[:] = [now]
        torch.set_num_threads(1)
    elif now == 1 and _threads_before:
        torch.set_num_threads(_threads_before[0])

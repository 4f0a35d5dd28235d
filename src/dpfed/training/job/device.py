"""Choose the device and the number of CPU threads that torch computes with."""

from __future__ import annotations

import torch

from dpfed.errors import DpfedError

# A smaller model is computed by one CPU thread: handing work to another costs more than it saves.
SMALL_MODEL = 1_000_000
# CPU threads of this process before a small model was given one thread; empty until then.
_threads_before: list[int] = []


def device_of(name: str) -> torch.device:
    """Return the device of `run.device`, set to compute float32 products in full precision."""
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
    """Make GPUs sum clipped gradients in full float32; TF32 products could exceed the clip norm."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def set_threads(threads: int | str, parameters: int) -> None:
    """Set the CPU threads of this process for a model with so many parameters.

    After a small model, "auto" gives a large one as many threads as there were before.
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

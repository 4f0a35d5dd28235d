"""Where our Triton kernels are used: on a GPU on which triton works. Everywhere else torch's own operations do the same.

triton comes with torch for GPUs. It builds its kernels when they are first called and needs a C compiler for that, so
whether it works is found by trying.
"""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor

LOG = logging.getLogger("dpfed")
interpreted = False  # set by tests: kernels on the CPU, by triton's interpreter


def usable(x: Tensor) -> bool:
    """Whether kernels can take this tensor. `DPFED_KERNELS=0` in the environment says no."""
    return interpreted or (x.is_cuda and works(x.device))


@functools.cache
def works(device: torch.device) -> bool:
    if os.environ.get("DPFED_KERNELS") == "0":
        return False
    try:
        from dpfed.kernels import lora

        one = torch.ones(1, 1, 1, device=device)
        return lora.two_products(one, one, one, torch.ones_like(one), 1.0, 1.0).item() == 1.0
    except Exception as error:  # no triton, no compiler, a GPU that it does not know, ...
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        LOG.warning("triton does not work here, so steps take longer than they could: %s", reason)
        return False

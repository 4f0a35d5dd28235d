"""Operators that run a Triton kernel where `accel.usable` returns True, otherwise plain PyTorch.

Only `attention` has no plain version. Where its kernels are not usable, its callers must run the
layer's own code instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfed.accel import TRITON


def declare_cost(operator: Any, operations: Callable[..., int]) -> None:
    """Tell torch.compile how many arithmetic operations `operator` needs.

    `operations` computes this number from the shapes of the arguments. Without the number, the
    compiler's memory planner assumes that the operator costs nothing. It then computes the
    operator's result a second time in the backward pass, instead of storing it.
    """
    if not TRITON:
        return
    # This PyTorch module imports triton. An import at the top would load triton in every process.
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if operator not in flop_registry:
        register_flop_formula(operator)(operations)

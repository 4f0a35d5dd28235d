"""Operators that run a kernel where `accel.usable` allows it, each with its plain path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfed.accel import TRITON


def declare_cost(operator: Any, operations: Callable[..., int]) -> None:
    """Tell torch.compile how many operations `operator` takes.

    Without a cost the compiler's memory planner takes it to be free and computes it twice.
    """
    if not TRITON:
        return
    # This module imports triton, so the import is not at the top.
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if operator not in flop_registry:
        register_flop_formula(operator)(operations)

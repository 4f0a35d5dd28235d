"""Triton's interpreter with the rounding of a GPU; importing this needs triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def round_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round bfloat16 as a GPU does.

    By itself it multiplies the bits of bfloat16 numbers and truncates instead of rounding.
    """
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def number(x: Any) -> Any:
        return cast(None, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def rounded(self: Any, x: Any, kind: Any) -> Any:
        if (x.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, kind)
        bits = (
            torch.from_numpy(np.ascontiguousarray(x.data))
            .bfloat16()
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
        )
        return TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: dot(self, number(a), number(b), *rest),
    )
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)

"""Kernels for Swin's windows against plain tensors. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are made
pytest.importorskip("triton")

from dpfed.model import window_kernels  # noqa: E402
from dpfed.model.window_kernels import available, reorder, window_attention  # noqa: E402

WHERE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_kernels, "INTERPRETED", not GPU)
    if not GPU and os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("there is neither a GPU nor the interpreter")
    if not GPU:
        products_of_bfloat16(monkeypatch)


def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as bits and multiplies those; here it multiplies the numbers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    known = interpreter.InterpreterBuilder.create_dot

    def number(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: known(self, number(a), number(b), *rest)
    )


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As it is written in textbooks, window after window and head after head."""
    heads = len(bias)
    depth = q.shape[2] // heads
    out = []
    for w in range(len(q)):
        parts = []
        for h in range(heads):
            at = slice(h * depth, (h + 1) * depth)
            scores = q[w, :, at] @ k[w, :, at].T * scale + bias[h]
            if mask is not None:
                scores = scores + mask[w % len(mask)]
            parts.append(scores.softmax(-1) @ v[w, :, at])
        out.append(torch.cat(parts, 1))
    return torch.stack(out)


def case(
    n: int, heads: int, depth: int, masked: bool, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    g = torch.Generator().manual_seed(n + heads)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(WHERE, dtype)

    tensors = [make(4, n, heads * depth) for _ in range(3)] + [make(heads, n, n)]
    mask = torch.where(torch.rand(2, n, n, generator=g) < 0.3, -100.0, 0.0).to(WHERE, dtype) if masked else None
    return tensors, mask, make(4, n, heads * depth)


def outcome(way: Any, tensors: list[Tensor], mask: Tensor | None, grad: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    y = way(q, k, v, tensors[3], mask, 0.3)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]


SHAPES = [(16, 3, 32), (16, 1, 32), (49, 3, 32), (49, 1, 16), (9, 3, 4), (4, 2, 20), (64, 1, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "heads", "depth"), SHAPES)
def test_attention_and_its_gradients(n: int, heads: int, depth: int, masked: bool, dtype: torch.dtype) -> None:
    tensors, mask, grad = case(n, heads, depth, masked, dtype)
    assert available(tensors[0])
    got = outcome(window_attention, tensors, mask, grad)
    exact = [t.double() for t in tensors], None if mask is None else mask.double(), grad.double()
    for mine, reference in zip(got, outcome(plain, *exact), strict=True):
        assert mine.dtype == dtype
        assert mine.shape == reference.shape
        error = (mine.double() - reference).norm() / reference.norm()
        assert error < (1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


def test_rows_of_other_layouts() -> None:
    """Neither side need be contiguous."""
    tensors, mask, grad = case(9, 2, 4, True, torch.float32)
    want = outcome(window_attention, tensors, mask, grad)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    q, k, v = (t.detach().requires_grad_() for t in turned[:3])
    y = window_attention(q, k, v, turned[3], mask, 0.3)
    got = [y, *torch.autograd.grad(y, (q, k, v), grad.transpose(0, 1).contiguous().transpose(0, 1))]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_a_window_that_is_not_finite_stays_alone() -> None:
    tensors, mask, grad = case(9, 2, 4, True, torch.float32)
    want = outcome(window_attention, tensors, mask, grad)
    tensors[1][2, 3, 1] = float("nan")
    got = outcome(window_attention, tensors, mask, grad)
    others = [0, 1, 3]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one[others], other[others])
        assert one[2, :, :4].isnan().all()
        assert one[2, :, 4:].isfinite().all(), "the other head is finite"


def test_what_has_no_kernel_is_refused() -> None:
    (q, k, v, bias), mask, _ = case(9, 2, 4, True, torch.float32)
    with pytest.raises(ValueError, match="no gradient"):
        window_attention(q, k, v, bias.requires_grad_(), mask, 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(q[:, :4], k[:, :4], v[:, :4], bias.detach(), None, 1.0)
    big = torch.zeros(1, 65, 4, device=WHERE)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(big, big, big, torch.zeros(1, 65, 65, device=WHERE), None, 1.0)
    assert not available(q.double())
    assert window_attention(q[:0], k[:0], v[:0], bias.detach(), mask, 1.0).shape == (0, 9, 8)


@pytest.mark.parametrize(("count", "n", "width"), [(3, 8, 20), (1, 64, 130), (5, 7, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_reordered(count: int, n: int, width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(n)
    x = torch.randn(count, n, width, generator=g).to(WHERE, dtype).requires_grad_()
    index = torch.randperm(n, generator=g).to(WHERE)
    grad = torch.randn(count, n, width, generator=g).to(WHERE, dtype)
    y = reorder(x, index, index.argsort())
    assert torch.equal(y, x[:, index])
    (back,) = torch.autograd.grad(y, x, grad)
    (want,) = torch.autograd.grad(x[:, index], x, grad)
    assert torch.equal(back, want)


def test_operators_are_what_they_say() -> None:
    """Fake results, schemas and gradients, checked as `torch` checks operators of its own."""
    (q, k, v, bias), mask, _ = case(4, 1, 4, True, torch.float32)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.dpfed.window_attention, (q, k, v, bias, mask, 0.5), test_utils=tests)
    index = torch.tensor([2, 0, 3, 1], device=WHERE)
    torch.library.opcheck(torch.ops.dpfed.reorder, (q, index, index.argsort()), test_utils=tests)

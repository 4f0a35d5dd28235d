"""Attention within windows and the reordering of rows against plain tensors.

Without a GPU the kernels run in Triton's interpreter. fast_paths/test_bert.py tests attention
without a bias.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from torch.utils.flop_counter import FlopCounterMode
from triton_interpreter import round_bfloat16

from dpfed import accel
from dpfed.accel.operators import attention
from dpfed.accel.operators.attention import available, reorder, window_attention

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", not GPU)
    if not GPU:
        round_bfloat16(monkeypatch)


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Textbook attention, window after window and head after head."""
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
    mask = (
        torch.where(torch.rand(2, n, n, generator=g) < 0.3, -100.0, 0.0).to(WHERE, dtype)
        if masked
        else None
    )
    return tensors, mask, make(4, n, heads * depth)


def outcome(way: Any, tensors: list[Tensor], mask: Tensor | None, grad: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    y = way(q, k, v, tensors[3], mask, 0.3)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]


SHAPES = [(16, 3, 32), (16, 1, 32), (49, 3, 32), (49, 1, 16), (9, 3, 4), (4, 2, 20), (64, 1, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "heads", "depth"), SHAPES)
def test_attention_and_its_gradients(
    n: int, heads: int, depth: int, masked: bool, dtype: torch.dtype
) -> None:
    tensors, mask, grad = case(n, heads, depth, masked, dtype)
    assert available(tensors[0])
    got = outcome(window_attention, tensors, mask, grad)
    exact = [t.double() for t in tensors], None if mask is None else mask.double(), grad.double()
    for mine, reference in zip(got, outcome(plain, *exact), strict=True):
        assert mine.dtype == dtype
        assert mine.shape == reference.shape
        error = (mine.double() - reference).norm() / reference.norm()
        assert error < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_rows_of_other_layouts() -> None:
    """Neither the inputs nor the gradient need be contiguous."""
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
    deep = torch.zeros(1, 4, 33, device=WHERE)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(deep, deep, deep, torch.zeros(1, 4, 4, device=WHERE), None, 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        # The number of masks does not divide the number of windows.
        window_attention(q, k, v, bias.detach(), torch.zeros(len(q) - 1, 9, 9, device=WHERE), 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(q, k.half(), v, bias.detach(), None, 1.0)
    assert not available(q.double())
    assert window_attention(q[:0], k[:0], v[:0], bias.detach(), mask, 1.0).shape == (0, 9, 8)


@pytest.mark.parametrize("wrong", ["scale", "bias", "mask", "window", "masks", "head"])
def test_a_kernel_is_tried_before_it_is_trusted(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention.right(torch.device(WHERE))
    right = attention._attend

    def other(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, scale: float, heads: int
    ) -> Tensor:
        added = None if wrong == "bias" else bias, None if wrong == "mask" else mask
        # The keys of another record.
        if wrong == "window":
            return right(q, k.roll(1, 0), v, *added, scale, heads)
        if wrong == "masks":
            added = bias, None if mask is None else mask.roll(1, 0)
        if wrong == "head":
            return right(q, k, v.roll(q.shape[2] // heads, 2), *added, scale, heads)
        return right(q, k, v, *added, 0.4 if wrong == "scale" else scale, heads)

    monkeypatch.setattr(attention, "_attend", other)
    assert not attention.right(torch.device(WHERE))


@pytest.mark.parametrize(("error", "works"), [(None, True), (RuntimeError("no C compiler"), False)])
def test_a_gpu_without_kernels_is_known_by_one_failure(
    error: Exception | None,
    works: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[torch.device] = []

    def attempt(device: torch.device) -> bool:
        tried.append(device)
        if error:
            raise error
        return True

    capturing, triton_works = [True], [True]
    monkeypatch.setattr(attention, "_WORKING", {})
    monkeypatch.setattr(attention, "right", attempt)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(accel, "works", lambda device: triton_works[0])
    assert not attention._works_on(1), "nothing is tried while a step is captured"
    capturing[0] = False
    assert [attention._works_on(1) for _ in range(3)] == 3 * [works]
    assert tried == [torch.device("cuda", 1)]
    assert ("no C compiler" in caplog.text) is not works
    triton_works[0] = False
    assert not attention._works_on(0)
    assert len(tried) == 1


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
    """The operators pass PyTorch's own checks of fake results, schemas and gradients."""
    (q, k, v, bias), mask, _ = case(4, 1, 4, True, torch.float32)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    torch.library.opcheck(
        torch.ops.dpfed.window_attention, (q, k, v, bias, mask, 0.5, 1), test_utils=CHECKS
    )
    for _ in range(2):
        attention.declare_attention_cost()
    with FlopCounterMode(display=False) as counter:
        window_attention(q, k, v, bias, mask, 0.5)
    # Two products of two operations, in four windows of 4 x 4 x 4.
    assert counter.get_total_flops() == 2 * 2 * 4 * 4 * 4 * 4
    index = torch.tensor([2, 0, 3, 1], device=WHERE)
    torch.library.opcheck(torch.ops.dpfed.reorder, (q, index, index.argsort()), test_utils=CHECKS)


def test_operator_without_a_bias_is_what_it_says() -> None:
    q, k, v = (torch.randn(2, 4, 4, device=WHERE, requires_grad=True) for _ in range(3))
    for mask in (None, torch.zeros(2, 1, 4, device=WHERE)):
        torch.library.opcheck(
            torch.ops.dpfed.window_attention, (q, k, v, None, mask, 0.5, 2), test_utils=CHECKS
        )
    for heads in (None, 0, 3):
        with pytest.raises(ValueError, match="does not fit"):
            window_attention(q, k, v, None, None, 0.5, heads)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(q, k, v, None, torch.zeros(2, 2, 4, device=WHERE), 0.5, 2)
    with pytest.raises(ValueError, match="no gradient"):
        window_attention(
            q, k, v, None, torch.zeros(2, 1, 4, device=WHERE, requires_grad=True), 0.5, 2
        )

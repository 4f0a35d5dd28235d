"""Kernels for Swin's windows against plain tensors (those of BERT: test_bert_attention.py). Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from gradient_case import Case, adapted, images, labels_of, swin
from torch.utils.flop_counter import FlopCounterMode

import dpfed.model.fast_paths.swin as twins
from dpfed import accel
from dpfed.accel import windows as triton_windows
from dpfed.model.fast_paths import windows
from dpfed.model.fast_paths.windows import available, reorder, window_attention

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", not GPU)
    if not GPU:
        honest_bfloat16(monkeypatch)


def honest_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as bits, multiplies those, and cuts numbers off instead of rounding them. A GPU does
    neither, and here the interpreter does not."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

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


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
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
    deep = torch.zeros(1, 4, 33, device=WHERE)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(deep, deep, deep, torch.zeros(1, 4, 4, device=WHERE), None, 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(
            q, k, v, bias.detach(), torch.zeros(len(q) - 1, 9, 9, device=WHERE), 1.0
        )  # not so many for each
    with pytest.raises(ValueError, match="does not fit"):
        window_attention(q, k.half(), v, bias.detach(), None, 1.0)
    assert not available(q.double())
    assert window_attention(q[:0], k[:0], v[:0], bias.detach(), mask, 1.0).shape == (0, 9, 8)


@pytest.mark.parametrize("wrong", ["scale", "bias", "mask", "window", "masks", "head"])
def test_a_kernel_is_tried_before_it_is_trusted(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows._try(torch.device(WHERE))
    right = windows._attend

    def other(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, scale: float, heads: int
    ) -> Tensor:
        added = None if wrong == "bias" else bias, None if wrong == "mask" else mask
        if wrong == "window":  # another record's
            return right(q, k.roll(1, 0), v, *added, scale, heads)
        if wrong == "masks":
            added = bias, None if mask is None else mask.roll(1, 0)
        if wrong == "head":
            return right(q, k, v.roll(q.shape[2] // heads, 2), *added, scale, heads)
        return right(q, k, v, *added, 0.4 if wrong == "scale" else scale, heads)

    monkeypatch.setattr(windows, "_attend", other)
    with pytest.raises(RuntimeError, match="other numbers"):
        windows._try(torch.device(WHERE))


@pytest.mark.parametrize(("error", "works"), [(None, True), (RuntimeError("no C compiler"), False)])
def test_a_gpu_without_kernels_is_known_by_one_failure(
    error: Exception | None,
    works: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[torch.device] = []

    def attempt(device: torch.device) -> None:
        tried.append(device)
        if error:
            raise error

    capturing, triton_works = [True], [True]
    monkeypatch.setattr(windows, "_WORKING", {})
    monkeypatch.setattr(windows, "_try", attempt)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(accel, "works", lambda device: triton_works[0])
    assert not windows._tried(1), "nothing is tried while a step is captured"
    capturing[0] = False
    assert [windows._tried(1) for _ in range(3)] == 3 * [works]
    assert tried == [torch.device("cuda", 1)]
    assert ("no C compiler" in caplog.text) is not works
    triton_works[0] = False
    assert not windows._tried(0)
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
    """Fake results, schemas and gradients, checked as `torch` checks operators of its own."""
    (q, k, v, bias), mask, _ = case(4, 1, 4, True, torch.float32)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    )
    torch.library.opcheck(
        torch.ops.dpfed.window_attention, (q, k, v, bias, mask, 0.5, 1), test_utils=tests
    )
    for _ in range(2):
        windows.declare_cost()
    with FlopCounterMode(display=False) as counter:
        window_attention(q, k, v, bias, mask, 0.5)
    assert (
        counter.get_total_flops() == 2 * 2 * 4 * 4 * 4 * 4
    )  # two products of two operations, in four windows of 4 x 4 x 4
    index = torch.tensor([2, 0, 3, 1], device=WHERE)
    torch.library.opcheck(torch.ops.dpfed.reorder, (q, index, index.argsort()), test_utils=tests)


# ---- whole models


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the operations that Swin's twins have used."""
    seen: list[str] = []

    def counted(name: str) -> Any:
        known = getattr(twins, name)
        return lambda *args: seen.append(name) or known(*args)

    for name in ("window_attention", "reorder"):
        monkeypatch.setattr(twins, name, counted(name))
    twins._KEPT.clear()
    yield seen
    twins._KEPT.clear()


ONE = {
    "image_size": 8,
    "depths": [2],
    "num_heads": [2],
}  # one stage of 4 x 4 patches in windows of 2


def used(calls: list[str]) -> tuple[int, int]:
    counts = calls.count("window_attention"), calls.count("reorder")
    calls.clear()
    return counts


def grads_of(case: Case, side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    case.ready.model.to(WHERE)
    case.ready.to(dtype)
    inputs = {"pixel_values": images(side)(2)["pixel_values"].to(WHERE, dtype)}
    args = (
        case.rows(2).to(WHERE),
        torch.tensor([0, 1], device=WHERE),
        inputs,
        labels_of(2).to(WHERE),
    )
    return torch.cat(case.ready.grads(*args), 1).double().cpu()


@pytest.mark.parametrize(
    ("side", "other", "reordered"),
    [
        (16, {}, 9),  # 8 x 8 and 4 x 4 patches in windows of 2, merged once
        (20, {"window_size": 4}, 1),  # 10 x 10 and 5 x 5 patches, padded, but merged
        (
            16,
            {"window_size": 4, "embed_dim": 12, "num_heads": [3, 6]},
            5,
        ),  # the second stage is one window
        (16, {"window_size": 4, "hidden_dropout_prob": 0.3, "drop_path_rate": 0.5}, 5),
    ],
    ids=["windows", "padded", "heads", "dropout"],
)
def test_gradients_of_records_equal_the_plain_way(
    side: int,
    other: dict[str, Any],
    reordered: int,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(adapted(swin(image_size=side, **other), "lora"))
    args = case.rows(2), torch.tensor([1, 0]), images(side)(2), labels_of(2)
    keys = torch.tensor([11, 12]) if case.ready.has_dropout else None
    case.ready.model.to(WHERE)

    def grads() -> Tensor:
        theta, client, inputs, labels = args
        moved = {name: x.to(WHERE) for name, x in inputs.items()}
        drawn = None if keys is None else keys.to(WHERE)
        return torch.cat(
            case.ready.grads(theta.to(WHERE), client.to(WHERE), moved, labels.to(WHERE), drawn), 1
        )

    got = grads()
    assert used(calls) == (4, reordered)
    monkeypatch.setattr(twins, "available", lambda x: False)
    want = grads()
    assert used(calls) == (0, 0)
    assert (got - want).norm() < 2e-5 * want.norm()


def test_low_precision_is_as_near_as_the_plain_way(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(adapted(swin(window_size=4), "lora"))
    exact = grads_of(case, 16)
    calls.clear()
    got = grads_of(case, 16, torch.bfloat16)
    assert used(calls) == (4, 5)
    monkeypatch.setattr(twins, "available", lambda x: False)
    want = grads_of(case, 16, torch.bfloat16)
    assert (got - exact).norm() < 1.2 * (want - exact).norm()


def test_scores_and_trained_tables(calls: list[str]) -> None:
    """Evaluation goes by the kernel; a table that is trained gets its gradient the plain way."""
    case = Case(adapted(swin(**ONE), "lora"))
    case.ready.model.to(WHERE)
    inputs = {name: x.to(WHERE) for name, x in images(8)(2).items()}
    got = case.ready.scores(case.rows(1)[0].to(WHERE), inputs)
    assert used(calls) == (2, 4)
    assert got.shape == (2, 3)
    full = Case(adapted(swin(**ONE), "full"))
    full.ready.model.to(WHERE)
    full.ready.scores(full.rows(1)[0].to(WHERE), inputs)
    assert used(calls) == (0, 4)
    if not GPU:
        full.check(images(8)(2), labels_of(2), clients=2)
        assert used(calls) == (0, 4)


def test_what_was_kept_without_gradients_serves_a_pass_with_them(calls: list[str]) -> None:
    case = Case(adapted(swin(**ONE), "lora"))
    with torch.inference_mode():
        case.ready.model.to(WHERE)(pixel_values=images(8)(1)["pixel_values"].to(WHERE))
    grads_of(case, 8)
    assert used(calls) == (4, 8)
    assert len(twins._KEPT) == 3  # a mask and two orders


@pytest.mark.parametrize("why", ["gradient", "dropout", "weights", "large", "deep", "precision"])
def test_the_plain_way_where_the_kernel_does_not_fit(why: str, calls: list[str]) -> None:
    other = {
        "large": {"window_size": 9, "image_size": 36, "depths": [1], "num_heads": [2]},
        "deep": {**ONE, "embed_dim": 34, "num_heads": [1]},
    }.get(why, {})
    model = swin(attention_probs_dropout_prob=0.5, **other).requires_grad_(why == "gradient")
    twins.fuse_windows(model.to(WHERE))
    asked: dict[str, Any] = {"output_attentions": True} if why == "weights" else {}
    if why == "dropout":
        model.train()
    if why == "precision":
        model.double()
    x = images(model.config.image_size)(1)["pixel_values"].to(WHERE, next(model.parameters()).dtype)
    model.set_attn_implementation("eager")
    out = model(pixel_values=x, **asked)
    assert used(calls)[0] == 0
    assert why != "weights" or all(a is not None for a in out.attentions)


def test_the_bias_follows_its_table(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = swin(**ONE).requires_grad_(False).to(WHERE)
    twins.fuse_windows(model)
    bias = next(m for m in model.modules() if type(m).__name__ == "SwinRelativePositionBias")
    x = images(8)(1)["pixel_values"].to(WHERE)
    made: list[int] = []
    known = type(bias).forward
    monkeypatch.setattr(type(bias), "forward", lambda self: made.append(1) or known(self))

    def check(fresh: int, model: nn.Module = model) -> None:
        made.clear()
        got = model(pixel_values=x.to(next(model.parameters()).dtype)).logits
        assert len(made) == fresh
        with monkeypatch.context() as off:
            off.setattr(twins, "available", lambda x: False)
            want = model(pixel_values=x.to(next(model.parameters()).dtype)).logits
        torch.testing.assert_close(
            got, want, rtol=2e-2, atol=2e-2 if got.dtype == torch.bfloat16 else 1e-5
        )

    check(2)
    check(0)
    check(2, copy.deepcopy(model))
    bias.relative_position_bias_table.mul_(3)
    check(1)
    bias.relative_position_bias_table.data = -bias.relative_position_bias_table
    check(1)
    state = {name: 2 * value for name, value in model.state_dict().items() if "bias_table" in name}
    model.load_state_dict(state, strict=False)
    check(2)
    model.load_state_dict(
        {name: -value for name, value in state.items()}, strict=False, assign=True
    )
    check(2)
    model.to(torch.bfloat16)
    check(2)
    check(0)
    assert not [name for name in model.state_dict() if "kept" in name]


def test_a_compiled_layer_takes_the_operator(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph, shifted windows and all; nothing is kept or read while tracing."""
    model = swin(**ONE).requires_grad_(False).to(WHERE)
    twins.fuse_windows(model)
    layer = next(
        m for m in model.modules() if type(m).__name__ == "FusedSwinLayer" and m.shift_size
    )
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).to(WHERE).requires_grad_()

    def outcome(call: Any) -> list[Tensor]:
        y = call(x, (4, 4))[0]
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    want = outcome(layer)
    twins._KEPT.clear()
    monkeypatch.undo()  # operations as they are, not counted
    monkeypatch.setattr(accel, "interpreted", not GPU)
    ran: list[str] = []
    for name in ("attend", "attend_backward", "reorder"):
        monkeypatch.setattr(triton_windows, name, Counted(name, getattr(triton_windows, name), ran))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for one, other in zip(outcome(compiled), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert ran == ["attend", "attend_backward"]
    assert not twins._KEPT


class Counted:
    def __init__(self, name: str, kernel: Any, ran: list[str]) -> None:
        self.name, self.kernel, self.ran = name, kernel, ran

    def __getitem__(self, grid: Any) -> Any:
        self.ran.append(self.name)
        return self.kernel[grid]

"""The patch kernels agree with `unfold`, `fold` and the plain path.

Without a GPU they run in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpfed import accel
from dpfed.accel import FLOATS
from dpfed.accel.operators import patches as plain
from dpfed.model.per_sample.batched_layers import TwinConv2d

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime import interpreter

from dpfed.accel import patches

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))
PADDING = st.tuples(st.integers(0, 3), st.integers(0, 3))
SIDES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    checked = accel._checked_kernels
    checked.cache_clear()
    yield
    checked.cache_clear()


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def fits(sides: tuple[int, int], kernel: tuple[int, int], padding: tuple[int, int]) -> bool:
    return all(side + 2 * p >= k for side, k, p in zip(sides, kernel, padding, strict=True))


def by_torch(monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(plain, "kernels_for", lambda name, x: None)
        return made()


@given(
    st.integers(1, 3),
    st.integers(1, 7),
    SIDES,
    PAIRS,
    PAIRS,
    PADDING,
    st.sampled_from(FLOATS),
)
@settings(max_examples=60)
def test_they_are_torchs_own(
    count: int,
    channels: int,
    sides: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    dtype: torch.dtype,
) -> None:
    """Copies are equal, and sums of whole numbers are exact in every type."""
    assume(fits(sides, kernel, padding))
    shape = (count, channels, *sides)
    x = drawn(shape, dtype)
    found = patches.columns(x, kernel, stride, padding)
    wanted = F.unfold(x.float(), kernel, 1, padding, stride)
    assert found.dtype == dtype
    assert torch.equal(found.float(), wanted)
    with pytest.MonkeyPatch.context() as patch:
        assert torch.equal(
            by_torch(patch, lambda: plain._columns(x, kernel, stride, padding)), found
        )
    grad = drawn(wanted.shape).mul(4).round()
    back = patches.images(grad.to(dtype), shape, kernel, stride, padding)
    assert back.dtype == dtype
    assert torch.equal(back.float(), F.fold(grad, sides, kernel, 1, padding, stride))


@given(st.integers(1, 3), st.integers(1, 7), SIDES, PAIRS, PAIRS, PADDING)
def test_sums_of_float32_have_the_plain_ways_bits(
    count: int, channels: int, sides: Any, kernel: Any, stride: Any, padding: Any
) -> None:
    assume(fits(sides, kernel, padding))
    shape = (count, channels, *sides)
    grad = drawn(patches.columns(drawn(shape), kernel, stride, padding).shape)
    found = patches.images(grad, shape, kernel, stride, padding)
    with pytest.MonkeyPatch.context() as patch:
        wanted = by_torch(patch, lambda: plain._images(grad, shape, kernel, stride, padding))
    assert torch.equal(found, wanted)
    torch.testing.assert_close(
        found, F.fold(grad, sides, kernel, 1, padding, stride), rtol=1e-5, atol=1e-5
    )


def test_half_precision_is_rounded_once() -> None:
    """Summing 256 and eight ones in bfloat16 would give 256."""
    grad = torch.ones(1, 9, 9, device=DEVICE)
    grad[0, 0] = 256.0
    found = patches.images(grad.bfloat16(), (1, 1, 3, 3), (3, 3), (1, 1), (1, 1))
    assert float(found[0, 0, 1, 1]) == 264.0


@pytest.mark.parametrize("shape", [(5, 70, 4, 4), (2, 3, 32, 32), (1, 1, 40, 60), (2, 130, 2, 2)])
def test_images_of_many_sizes(shape: tuple[int, ...]) -> None:
    """The sizes give several planes for a program, or several programs for a plane."""
    x = drawn(shape)
    wanted = F.unfold(x, 3, 1, 1)
    assert torch.equal(patches.columns(x, (3, 3), (1, 1), (1, 1)), wanted)
    back = patches.images(wanted, shape, (3, 3), (1, 1), (1, 1))
    torch.testing.assert_close(back, F.fold(wanted, shape[2:], 3, 1, 1), rtol=1e-5, atol=1e-5)


def test_inputs_that_do_not_lie_one_after_another() -> None:
    x = drawn((4, 6, 5, 3)).permute(2, 1, 0, 3)[::2, 1:]
    found = torch.ops.dpfed.patches(x, (2, 2), (1, 1), (1, 0))
    assert torch.equal(found, F.unfold(x, 2, 1, (1, 0)))
    grad = drawn((found.shape[2], *found.shape[:2])).permute(1, 2, 0)
    back = torch.ops.dpfed.patches_back(grad, x.shape, (2, 2), (1, 1), (1, 0))
    torch.testing.assert_close(back, F.fold(grad, x.shape[2:], 2, 1, (1, 0)))


def test_what_is_no_number_stays_in_its_plane() -> None:
    x = drawn((3, 4, 5, 5))
    x[1, 2] = float("nan")
    found = patches.columns(x, (3, 3), (1, 1), (1, 1)).view(3, 4, -1)
    assert found.isnan().any(2).nonzero().tolist() == [[1, 2]]
    back = patches.images(found.view(3, 36, 25), x.shape, (3, 3), (1, 1), (1, 1))
    assert back.isnan().flatten(2).any(2).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("back", [False, True])
def test_planes_beyond_the_first_two_thousand_million_numbers(
    back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last program's place exceeds 32 bits.

    The interpreter runs that program alone, and the memory before it is reserved but not
    touched.
    """
    planes, side = 2**19 + 2, 64
    x = torch.empty(planes * side * side, dtype=torch.float16, device=DEVICE)
    x[-patches.BLOCK :] = torch.arange(patches.BLOCK)
    if DEVICE.type == "cpu":
        last = np.array([x.numel() // patches.BLOCK - 1], dtype=np.int32)
        handle = interpreter.TensorHandle(last, tl.int32)
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, "create_get_program_id", lambda *_: handle
        )
        monkeypatch.setattr(patches.triton, "cdiv", lambda *_: 1)
    shape, asked = (planes, 1, side, side), ((1, 1), (1, 1), (0, 0))
    y = (
        patches.images(x.view(planes, 1, -1), shape, *asked)
        if back
        else patches.columns(x.view(shape), *asked)
    )
    assert torch.equal(y.view(-1)[-patches.BLOCK :], x[-patches.BLOCK :])


def test_nothing_at_all_and_what_does_not_fit() -> None:
    assert patches.columns(drawn((0, 3, 4, 4)), (3, 3), (1, 1), (0, 0)).shape == (0, 27, 4)
    assert patches.images(drawn((0, 27, 4)), (0, 3, 4, 4), (3, 3), (1, 1), (0, 0)).shape == (
        0,
        3,
        4,
        4,
    )
    with pytest.raises(ValueError, match="kernel of 5 x 5 does not fit images of 4 x 4"):
        plain.patches(drawn((2, 3, 4, 4)), (5, 5), (1, 1), (0, 0))
    assert patches.fits((1, 1, 2**15, 2**15), (1, 1), (1, 1), (0, 0))
    assert not patches.fits((1, 1, 2**15, 2**15), (3, 3), (1, 1), (1, 1))
    assert not patches.fits((1, 1, 2**16, 2**15), (1, 1), (8, 8), (0, 0))


@pytest.mark.parametrize("by_kernel", [False, True])
def test_gradients_of_both_ways(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the other's adjoint: exactly for whole numbers, by differences in float64."""
    if not by_kernel:
        monkeypatch.setattr(plain, "kernels_for", lambda name, x: None)
    asked = (3, 2), (2, 1), (1, 0)
    x = drawn((2, 3, 6, 5)).mul(4).round().requires_grad_()
    y = plain.patches(x, *asked)
    weights = drawn(y.shape, seed=1).mul(4).round()
    (back,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    assert torch.equal(back, F.fold(weights, (6, 5), *asked[:1], 1, *asked[:0:-1]))
    assert torch.equal((y * weights).sum(), (x * back).sum())
    twice = torch.autograd.grad(
        (plain.patches(x.square(), *asked) * weights).sum(), x, create_graph=True
    )[0]
    torch.testing.assert_close(torch.autograd.grad(twice.sum(), x)[0], 2 * back)
    exact = drawn((1, 2, 4, 4)).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: plain.patches(t, *asked), exact)
    assert torch.autograd.gradgradcheck(lambda t: plain.patches(t, *asked), exact)


def test_a_kernel_of_one_is_no_copy() -> None:
    x = drawn((2, 3, 4, 4))
    assert plain.patches(x, (1, 1), (1, 1), (0, 0)).data_ptr() == x.data_ptr()


def test_compiled_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators stay opaque inside one compiled program."""
    monkeypatch.setattr(TwinConv2d, "_product_is_faster", lambda self, x: True)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.Tanh(), torch.nn.Conv2d(4, 2, 2)
    ).to(DEVICE)
    for conv in (model[0], model[2]):
        conv.__class__ = TwinConv2d
    x = drawn((5, 3, 6, 6))
    copies = {n: drawn((5, *p.shape)).requires_grad_() for n, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    wanted = torch.autograd.grad(loss(copies), list(copies.values()))
    for one, other in zip(
        torch.autograd.grad(compiled(copies), list(copies.values())), wanted, strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_wrong_numbers_are_noticed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, images = patches.columns, patches.images
    assert patches.right(DEVICE, dtype)
    for name, wrong in (
        ("columns", lambda x, k, s, p: columns(x.roll(1, 3), k, s, p)),
        ("columns", lambda x, k, s, p: columns(x.flip(1), k, s, p)),
        ("columns", lambda x, k, s, p: columns(x.transpose(2, 3), k[::-1], s[::-1], p[::-1])),
        ("images", lambda x, shape, k, s, p: images(x.roll(1, 2), shape, k, s, p)),
        ("images", lambda x, shape, k, s, p: images(x.roll(1, 1), shape, k, s, p)),
        ("images", lambda x, shape, k, s, p: images(x, shape, k, s, p).clamp(max=20)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(patches, name, wrong)
            assert not patches.right(DEVICE, dtype), name


@pytest.mark.parametrize("state", ["wrong", "failing"])
def test_kernels_that_are_not_right_are_not_used(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def right(device: torch.device, dtype: torch.dtype) -> bool:
        if state == "failing":
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")
        return False

    monkeypatch.setattr(patches, "right", right)
    monkeypatch.setattr(patches, "columns", lambda *given: pytest.fail("the kernel was called"))
    x = drawn((2, 3, 4, 4))
    for _ in range(2):
        assert torch.equal(plain.patches(x, (3, 3), (1, 1), (1, 1)), F.unfold(x, 3, 1, 1))
    assert len(caplog.records) == 1
    assert {"wrong": "other numbers", "failing": "C compiler"}[state] in caplog.text


def test_where_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn((2, 3, 4, 4))
    assert accel.kernels_for("patches", x) is patches
    assert accel.kernels_for("patches", x.double()) is None
    monkeypatch.setattr(accel, "_tried", set())
    monkeypatch.setattr(accel, "_checked_kernels", lambda *given: pytest.fail("it was tried"))
    monkeypatch.setattr(accel, "usable", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # During a capture nothing is tried.
    assert accel.kernels_for("patches", x) is None
    monkeypatch.setattr(accel, "usable", lambda x: False)
    assert accel.kernels_for("patches", x) is None

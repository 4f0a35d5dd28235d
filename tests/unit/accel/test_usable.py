"""Kernels are used if triton works, and results do not depend on them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dpfed import accel


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    works = accel.works
    works.cache_clear()
    yield
    works.cache_clear()


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", False)
    monkeypatch.setattr(accel, "works", lambda device: pytest.fail("it was tried"))
    assert not accel.usable(torch.zeros(1))


def test_without_triton_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "dpfed.accel.lora", None)  # type: ignore[arg-type]
    monkeypatch.delattr("dpfed.accel.lora", raising=False)
    assert not accel.works(torch.device("cpu"))
    assert not accel.works(torch.device("cpu"))
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert "longer" in caplog.text


@pytest.mark.parametrize("kind", ["lora", "norm"])
def test_kernels_that_fail_or_err_are_none(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    from dpfed.accel import lora, norm

    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    assert accel.works(torch.device("cpu"))
    accel.works.cache_clear()
    monkeypatch.setattr(
        *{"lora": (lora, "right"), "norm": (norm, "right")}[kind], lambda device: False
    )
    assert not accel.works(torch.device("cpu"))
    assert "other numbers" in caplog.text
    accel.works.cache_clear()

    def fail(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(*{"lora": (lora, "right"), "norm": (norm, "right")}[kind], fail)
    assert not accel.works(torch.device("cpu"))
    assert "Failed to find C compiler" in caplog.text
    assert "specify" not in caplog.text


def test_wrong_kernels_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from dpfed.accel import lora, norm

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    two, outer, forward, backward = lora.two_products, lora.outer, norm.forward, norm.backward
    assert lora.right(device)
    assert norm.right(device)
    for module, name, wrong in (
        (lora, "two_products", lambda x, w1, w2, y, s1, s2: two(x, w1, w2, y, s1, s1)),
        (lora, "outer", lambda x, low, s, wide: outer(x, low, 1.0, wide)),
        (norm, "forward", lambda x, w, b, eps: forward(x, w, 0 * b, eps)),
        (norm, "backward", lambda grad, x, w, mean, rstd: backward(grad, x, w, 0 * mean, rstd)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            assert not module.right(device), name


def test_not_inside_vmap() -> None:
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(accel.usable(x)) or x)(torch.ones(2, 3))
    assert seen == [False]
    assert accel.usable(torch.ones(2, 3)) or torch.cuda.is_available()


def test_nothing_is_tried_inside_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", False)
    monkeypatch.setattr(accel, "works", lambda device: pytest.fail("it was tried"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.vmap(lambda x: (accel.usable(x), x)[1])(torch.ones(2, 3))


def test_they_are_tried_with_gradients_wherever_they_are_asked_for() -> None:
    """The first call may come from an operator's forward, which runs below autograd."""

    def right() -> bool:
        x = torch.ones(2, requires_grad=True)
        return torch.equal(*torch.autograd.grad((x * x).sum(), x), 2 * x)

    def ask(x: Tensor) -> Tensor:
        return x + float(accel.passes_check("kernels of a test", x.device, right))

    inside = torch.library.custom_op(
        "dpfed_test::ask", ask, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    with pytest.raises(RuntimeError, match="does not require grad"), torch.no_grad():
        right()
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            assert ask(torch.zeros(())) == 1
            assert inside(torch.zeros(())) == 1


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFED_KERNELS", "0")
    assert not accel.works(torch.device("cpu"))


def test_nothing_is_tried_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check would break the capture, and its failure says nothing about the kernels."""
    tried: list[torch.device] = []
    gpu = torch.device("cuda", 0)
    there = SimpleNamespace(is_cuda=True, device=gpu, dtype=torch.float32)
    monkeypatch.setattr(accel, "interpreted", False)
    monkeypatch.setattr(accel, "_tried", set())
    monkeypatch.setattr(accel, "works", lambda device: not tried.append(device))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not accel.usable(there)  # type: ignore[arg-type]
    assert tried == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert accel.usable(there)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert accel.usable(there)  # type: ignore[arg-type]
    assert tried == [gpu, gpu]


def test_double_precision_goes_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", True)
    assert accel.usable(torch.zeros(1))
    assert not accel.usable(torch.zeros(1, dtype=torch.float64))

"""The LoRA kernels agree with plain sums and with PyTorch's products, in triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from dpfed.accel.operators import lora as operators
from dpfed.accel.operators.lora import LoraProduct

pytest.importorskip("triton")


@pytest.fixture
def kernels() -> ModuleType:
    from dpfed.accel import lora

    return lora


SHAPES = [(3, 16, 32, 96, 16), (2, 50, 48, 40, 4), (2, 5, 33, 70, 20), (1, 130, 64, 128, 16)]


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("samples", "n", "wide", "out", "r"), SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_products(
    kernels: ModuleType,
    samples: int,
    n: int,
    wide: int,
    out: int,
    r: int,
    dtype: torch.dtype,
    error: float,
) -> None:
    x, y = some(samples, n, wide, dtype=dtype), some(samples, n, out, seed=1, dtype=dtype)
    a, b = (
        some(samples, wide, r, seed=2, dtype=dtype),
        some(samples, out, r, seed=3, dtype=dtype).transpose(1, 2),
    )
    low = 0.5 * x.double() @ a.double()
    expected = y.double() + 1.5 * low @ b.double()
    found = kernels.two_products(x, a, b, y, 0.5, 1.5)
    for one, other in ((found, low), (y, expected)):
        assert (one.double() - other).norm() <= error * other.norm()
    for is_wide in (False, True):
        grad = kernels.outer(x, found, 3.0, is_wide)
        expected = 3.0 * x.double().transpose(1, 2) @ found.double()
        grad = grad.transpose(1, 2) if is_wide else grad
        assert grad.shape == expected.shape
        assert (grad.double() - expected).norm() <= error * expected.norm()


def test_what_the_kernels_do_not_take(kernels: ModuleType) -> None:
    x = some(2, 8, 6)
    assert kernels.fits(x, 64)
    # More float32 numbers than a block of a small GPU holds.
    assert not kernels.fits(x, 65)
    assert kernels.fits(x.half(), 128)
    assert not kernels.fits(x.half(), 129)
    assert not kernels.fits(x.double(), 16)
    assert not kernels.fits(x.transpose(1, 2), 16)


@pytest.mark.parametrize("needs_x", [True, False])
def test_the_product_is_the_same_with_them(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, needs_x: bool
) -> None:
    calls: list[str] = []
    for name in ("two_products", "outer"):
        old = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, name=name, old=old: calls.append(name) or old(*args)
        )
    weight, bias = some(20, 12), some(20, seed=1)
    found = []
    for way in ("kernels", "plain"):
        if way == "plain":
            monkeypatch.setattr(operators, "kernels_for", lambda name, x: None)
        x = some(3, 7, 12, seed=2).requires_grad_(needs_x)
        # held transposed, as `per_sample.gradients` stores them
        a, b = some(3, 12, 4, seed=3).transpose(1, 2), some(3, 4, 20, seed=4).transpose(1, 2)
        a.requires_grad_()
        b.requires_grad_()
        y = LoraProduct.apply(x, weight, bias, a, b, 0.7)  # type: ignore[no-untyped-call]
        asked = [a, b, x] if needs_x else [a, b]
        found.append((y, *torch.autograd.grad(y.square().sum(), asked)))
    assert calls == (
        ["two_products", "two_products", "outer", "outer"] if needs_x else ["two_products"]
    )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

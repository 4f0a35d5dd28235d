"""The fused adapter gives peft's values and gradients."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call

from dpfed.accel.operators.lora import LoraProduct
from dpfed.model.fast_paths.lora import fuse_lora
from dpfed.model.per_sample.batched_layers import BatchedLinear


def test_gradients_by_differences() -> None:
    g = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=g)

    x, a, b = (t.requires_grad_() for t in (make(3, 4, 5), make(3, 2, 5), make(3, 6, 2)))
    weight, bias = make(6, 5), make(6)
    torch.autograd.gradcheck(
        lambda x, a, b: LoraProduct.apply(x, weight, bias, a, b, 1.7), (x, a, b)
    )
    torch.autograd.gradcheck(
        lambda a, b: LoraProduct.apply(x.detach(), weight, None, a, b, 0.3), (a, b)
    )


def adapted(dropout: float = 0.0, bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 4))
    model = get_peft_model(
        body, LoraConfig(r=2, lora_alpha=5.0, target_modules=["0", "2"], lora_dropout=dropout)
    ).get_base_model()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" in name:
            nn.init.normal_(p, std=0.5)
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = BatchedLinear
    return model.eval()


def copies(model: nn.Module, samples: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    return {
        n: (p + 0.1 * torch.randn(samples, *p.shape, generator=g)).detach().requires_grad_()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize("shape", [(3, 6), (3, 5, 6), (12, 5, 6), (3, 2, 2, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, fused = adapted(bias=bias), adapted(bias=bias)
    fuse_lora(fused)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    out = []
    for model in (plain, fused):
        weights = copies(model, 3)
        y = functional_call(model, weights, (x,))
        out.append((y, torch.autograd.grad(y.square().sum(), list(weights.values()))))
    assert out[0][0].shape == out[1][0].shape
    torch.testing.assert_close(out[0][0], out[1][0])
    for one, other in zip(out[0][1], out[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_is_used_where_it_can_be_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    apply = LoraProduct.apply
    monkeypatch.setattr(LoraProduct, "apply", lambda *args: calls.append(1) or apply(*args))
    x = torch.randn(3, 5, 6)
    for model, weights, expected in (
        (adapted(), True, 2),
        # Evaluation uses the own weights, not copies.
        (adapted(), False, 0),
        (adapted(dropout=0.5), True, 0),
    ):
        fuse_lora(model)
        calls.clear()
        want = functional_call(model, copies(model, 3), (x,)) if weights else model(x)
        assert want.shape == (3, 5, 4)
        assert len(calls) == expected


@pytest.mark.parametrize("needs_x", [True, False])
def test_compilers_are_given_the_same_function(needs_x: bool) -> None:
    g = torch.Generator().manual_seed(4)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    x = make(3, 4, 5).requires_grad_(needs_x)
    a, b = (
        make(3, 5, 2).transpose(1, 2).requires_grad_(),
        make(3, 2, 6).transpose(1, 2).requires_grad_(),
    )
    weight, bias = make(6, 5), make(6)
    torch.library.opcheck(torch.ops.dpfed.lora_product.default, (x, weight, bias, a, b, 1.7))
    asked = [a, b, x] if needs_x else [a, b]
    whole = torch.compile(
        lambda x, a, b: torch.ops.dpfed.lora_product(x, weight, bias, a, b, 1.7)[0],
        backend="aot_eager",
    )
    one = torch.autograd.grad(whole(x, a, b).square().sum(), asked)
    other = torch.autograd.grad(LoraProduct.apply(x, weight, bias, a, b, 1.7).square().sum(), asked)
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_compilers_are_told_what_it_costs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    fuse_lora(adapted())
    x, weight, a, b = (
        torch.zeros(3, 4, 5),
        torch.zeros(6, 5),
        torch.zeros(3, 2, 5),
        torch.zeros(3, 6, 2),
    )
    with FlopCounterMode(display=False) as counter:
        torch.ops.dpfed.lora_product(x, weight, None, a, b, 1.0)
    assert counter.get_total_flops() == 2 * 3 * 4 * (5 * 6 + 2 * 5 + 2 * 6)

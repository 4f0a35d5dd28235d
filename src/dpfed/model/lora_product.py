"""A frozen linear layer with a LoRA adapter of its own for every sample, as one operation with its own backward pass.

Written with autograd, the base's output, the adapter's output, the scale and the sum are passes over memory of their own, and
so are their gradients. Here matrix products add to what is there, and each weight's gradient is made once, in one piece.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfed.model.keyed import once


class LoraProduct(torch.autograd.Function):
    """`x Wᵀ + c + s (x Aᵀ) Bᵀ` for x `[M, n, in]`, W `[out, in]` frozen, A `[M, r, in]`, B `[M, out, r]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = torch.bmm(x, a.transpose(1, 2))
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return F.linear(x, weight, bias).baddbmm_(low, b.transpose(1, 2), alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, a, b, low = ctx.saved_tensors
        down = _scaled_bmm(grad, b, ctx.scale)
        grad_b = _scaled_bmm(low.transpose(1, 2), grad, ctx.scale).transpose(1, 2)
        grad_a = torch.bmm(x.transpose(1, 2), down).transpose(1, 2)
        grad_x = torch.matmul(grad, weight).baddbmm_(down, a) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_a, grad_b, None


def _scaled_bmm(one: Tensor, other: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(one.new_empty(1, 1, 1), one, other, beta=0, alpha=scale)  # with beta 0 it is not read


def fuse_lora(model: nn.Module) -> None:
    """Every linear adapter of peft computes by `LoraProduct` where it can: one adapter, no dropout, samples' own weights.

    A compiler has fusions of its own and gets the plain form.
    """
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.__class__ = _twin(Linear)


@once
def _twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in self.active_adapters if name in self.lora_A]
        plain = self.disable_adapters or self.merged or self.lora_variant or args or kwargs
        if plain or len(names) != 1 or torch.compiler.is_compiling() or not _fits(self, names[0], x):
            return cls.forward(self, x, *args, **kwargs)
        base, a, b = self.base_layer, self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
        rows = x.reshape(len(b), -1, x.shape[-1])
        y = LoraProduct.apply(rows, base.weight, base.bias, a, b, self.scaling[names[0]])  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])

    return type("TwinLora", (cls,), {"forward": forward, "__module__": __name__})


def _fits(layer: Any, name: str, x: Tensor) -> bool:
    a, b, base = layer.lora_A[name].weight, layer.lora_B[name], layer.base_layer.weight
    return bool(
        a.dim() == b.weight.dim() == 3
        and b.bias is None
        and base.dim() == 2
        and not base.requires_grad
        and isinstance(layer.lora_dropout[name], nn.Identity)
        and x.dtype == a.dtype == base.dtype
        and x.shape[0] % len(a) == 0
    )

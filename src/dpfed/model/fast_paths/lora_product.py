"""A frozen linear layer with a LoRA adapter of its own for every sample, as one operation with its own backward pass.

Written with autograd, the base's output, the adapter's output, the scale and the sum are passes over memory of their own, and
so are their gradients. Here matrix products add to what is there, and each weight's gradient is made once, in one piece.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfed.accel import TRITON, usable
from dpfed.model.per_sample.keyed_dropout import once


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`x Wᵀ + c + s (x Aᵀ) Bᵀ` and `x Aᵀ`, for x `[M, n, in]`, W `[out, in]` frozen, A `[M, r, in]`, B `[M, out, r]`."""
    y = F.linear(x, weight, bias)
    kernels = kernels_for(x, a.shape[1])
    if kernels is not None:
        return y, kernels.two_products(x, a.transpose(1, 2), b.transpose(1, 2), y, 1.0, scale)
    low = torch.bmm(x, a.transpose(1, 2))
    return y.baddbmm_(low, b.transpose(1, 2), alpha=scale), low


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    low: Tensor,
    scale: float,
    first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """With respect to x (not made where it is the `first` layer's, which nobody asks for), A and B."""
    kernels = None if first else kernels_for(x, a.shape[1])
    if kernels is not None:
        grad = grad.contiguous()
        grad_x = torch.matmul(grad, weight)
        down = kernels.two_products(grad, b, a, grad_x, scale, 1.0)
        grad_a, grad_b = kernels.outer(x, down, 1.0, False), kernels.outer(grad, low, scale, True)
        return grad_x, grad_a.transpose(1, 2), grad_b.transpose(1, 2)
    down = _scaled_bmm(grad, b, scale)
    grad_b = _scaled_bmm(low.transpose(1, 2), grad, scale).transpose(1, 2)
    grad_a = torch.bmm(x.transpose(1, 2), down).transpose(1, 2)
    return (
        grad.new_empty(0) if first else torch.matmul(grad, weight).baddbmm_(down, a),
        grad_a,
        grad_b,
    )


def _scaled_bmm(one: Tensor, other: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(
        one.new_empty(1, 1, 1), one, other, beta=0, alpha=scale
    )  # with beta 0 it is not read


def kernels_for(x: Tensor, rank: int) -> Any | None:
    """The kernels for these products, where they can take them."""
    if not usable(x):
        return None
    from dpfed.accel import lora

    return lora if lora.fits(x, rank) else None


class LoraProduct(torch.autograd.Function):
    """`product` with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        y, low = product(x, weight, bias, a, b, scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first = not ctx.needs_input_grad[0]
        x, weight, a, b, low = ctx.saved_tensors
        grad_x, grad_a, grad_b = gradients(grad, x, weight, a, b, low, ctx.scale, first)
        return None if first else grad_x, None, None, grad_a, grad_b, None


# A compiler is given the same two functions as operators that it does not look into: it fuses what is around them.

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)"
)
_BACK = "(Tensor grad, Tensor x, Tensor weight, Tensor a, Tensor b, Tensor low, float scale, bool first) -> (Tensor, Tensor, Tensor)"
_opaque = torch.library.custom_op("dpfed::lora_product", product, mutates_args=(), schema=_SCHEMA)
_opaque_back = torch.library.custom_op(
    "dpfed::lora_gradients", gradients, mutates_args=(), schema=_BACK
)


@_opaque.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:2], weight.shape[0]), x.new_empty(*x.shape[:2], a.shape[1])


@_opaque_back.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    low: Tensor,
    scale: float,
    first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (samples, rank, wide), out = a.shape, b.shape[1]
    grad_a = x.new_empty(samples, wide, rank).transpose(1, 2)
    return (
        x.new_empty(0 if first else x.shape),
        grad_a,
        x.new_empty(samples, rank, out).transpose(1, 2),
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, a, b, scale = inputs
    ctx.save_for_backward(x, weight, a, b, output[1])
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    first = not ctx.needs_input_grad[0]
    grad_x, grad_a, grad_b = torch.ops.dpfed.lora_gradients(
        grad, *ctx.saved_tensors, ctx.scale, first
    )
    return None if first else grad_x, None, None, grad_a, grad_b, None


_opaque.register_autograd(_backward, setup_context=_setup)


def declare_cost() -> None:
    """A compiler that weighs memory against time would take what it cannot look into for nothing, and compute it twice."""
    from torch.utils.flop_counter import (
        flop_registry,
        register_flop_formula,
    )  # imports triton, so not at the top

    def operations(
        x: tuple[int, ...],
        weight: tuple[int, ...],
        bias: Any,
        a: tuple[int, ...],
        *_: Any,
        **others: Any,
    ) -> int:
        (samples, n, wide), out, rank = x, weight[0], a[1]
        return 2 * samples * n * (wide * out + rank * (wide + out))

    if torch.ops.dpfed.lora_product not in flop_registry:
        register_flop_formula(torch.ops.dpfed.lora_product)(operations)


def fuse_lora(model: nn.Module) -> None:
    """Every linear adapter of peft computes by `LoraProduct` where it can: one adapter, no dropout, samples' own weights.

    A compiler that cannot be given the kernels has fusions of its own and gets the plain form.
    """
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.__class__ = _twin(Linear)
            if TRITON:
                declare_cost()


@once
def _twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in self.active_adapters if name in self.lora_A]
        plain = self.disable_adapters or self.merged or self.lora_variant or args or kwargs
        if plain or len(names) != 1 or not _fits(self, names[0], x):
            return cls.forward(self, x, *args, **kwargs)
        base, a, b = self.base_layer, self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
        rows, scale = x.reshape(len(b), -1, x.shape[-1]), self.scaling[names[0]]
        if torch.compiler.is_compiling():
            if not x.is_cuda:
                return cls.forward(self, x, *args, **kwargs)
            y, _ = torch.ops.dpfed.lora_product(
                rows.contiguous(), base.weight, base.bias, a, b, scale
            )
        else:
            y = LoraProduct.apply(rows.contiguous(), base.weight, base.bias, a, b, scale)  # type: ignore[no-untyped-call]
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

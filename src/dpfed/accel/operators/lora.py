"""A frozen linear layer with one LoRA adapter per sample, as one operator.

Plain autograd reads and writes memory for each of four steps: the frozen layer's output, the
adapter's output, its scaling, and their sum. Here the adapter's products are added directly to the
frozen layer's output. In the backward pass, one product gives the gradient of each LoRA matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.accel import kernels_for
from dpfed.accel.operators import declare_cost


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the layer's output `x Wᵀ + c + s (x Aᵀ) Bᵀ` and the intermediate result `x Aᵀ`.

    The backward pass needs `x Aᵀ` again.

    x       inputs of M samples with n positions each, `[M, n, in]`
    weight  the frozen W, `[out, in]`
    bias    the frozen c, `[out]`, or None
    a, b    LoRA matrices A and B of the samples, `[M, r, in]` and `[M, out, r]`, of rank r
    scale   the factor s
    """
    y = F.linear(x, weight, bias)
    kernels = kernels_for("lora", x)
    if kernels is not None and kernels.fits(x, a.shape[1]):
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
    """Return the gradients of the layer's inputs x and of the LoRA matrices A and B.

    grad   gradient of the layer's output, `[M, n, out]` for M samples with n positions each
    low    `x Aᵀ`, from `product`
    first  True if x needs no gradient, as in a model's first layer; its gradient is then empty
    """
    kernels = None if first else kernels_for("lora", x)
    if kernels is not None and kernels.fits(x, a.shape[1]):
        grad = grad.contiguous()
        grad_x = torch.matmul(grad, weight)
        down = kernels.two_products(grad, b, a, grad_x, scale, 1.0)
        grad_a = kernels.outer(x, down, 1.0, False)
        grad_b = kernels.outer(grad, low, scale, True)
        return grad_x, grad_a.transpose(1, 2), grad_b.transpose(1, 2)
    down = _scaled_bmm(grad, b, scale)
    grad_b = _scaled_bmm(low.transpose(1, 2), grad, scale).transpose(1, 2)
    grad_a = torch.bmm(x.transpose(1, 2), down).transpose(1, 2)
    if first:
        return grad.new_empty(0), grad_a, grad_b
    return torch.matmul(grad, weight).baddbmm_(down, a), grad_a, grad_b


def _scaled_bmm(one: Tensor, other: Tensor, scale: float) -> Tensor:
    # With beta = 0, `baddbmm` ignores the values of its first argument, so this one is a dummy.
    return torch.baddbmm(one.new_empty(1, 1, 1), one, other, beta=0, alpha=scale)


class LoraProduct(torch.autograd.Function):
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


# Register both functions as operators of PyTorch. torch.compile then calls them unchanged, and
# generates code only for the operations around them.
_opaque = torch.library.custom_op(
    "dpfed::lora_product",
    product,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scale)"
    " -> (Tensor, Tensor)",
)
_opaque_back = torch.library.custom_op(
    "dpfed::lora_gradients",
    gradients,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor a, Tensor b, Tensor low, float scale,"
    " bool first) -> (Tensor, Tensor, Tensor)",
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
    samples, rank, wide = a.shape
    grad_x = x.new_empty(0 if first else x.shape)
    grad_a = x.new_empty(samples, wide, rank).transpose(1, 2)
    grad_b = x.new_empty(samples, rank, b.shape[1]).transpose(1, 2)
    return grad_x, grad_a, grad_b


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, a, b, scale = inputs
    ctx.save_for_backward(x, weight, a, b, output[1])
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    first = not ctx.needs_input_grad[0]
    grad_x, grad_a, grad_b = torch.ops.dpfed.lora_gradients(
        grad, *ctx.saved_tensors, ctx.scale, first
    )
    return None if first else grad_x, None, None, grad_a, grad_b, None


_opaque.register_autograd(_backward, setup_context=_save)


def declare_product_cost() -> None:
    def operations(x: Any, weight: Any, bias: Any, a: Any, *_: Any, **others: Any) -> int:
        samples, n, wide = x
        out, rank = weight[0], a[1]
        return int(2 * samples * n * (wide * out + rank * (wide + out)))

    declare_cost(torch.ops.dpfed.lora_product, operations)

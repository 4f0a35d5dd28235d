"""Frozen layer normalisation by kernels of our own, where there are any: torch's takes several times as long on narrow rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel import usable


class FrozenNorm(torch.autograd.Function):
    """The gradient is that of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from dpfed.accel import norm

        y, mean, rstd = norm.forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from dpfed.accel import norm

        return norm.backward(grad.contiguous(), *ctx.saved_tensors), None, None, None


class FusedLayerNorm(nn.LayerNorm):
    """A layer that is not trained; a trained one is `twins.TwinLayerNorm`. A compiler has a kernel of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self._fits(x):
            return super().forward(x)
        y: Tensor = FrozenNorm.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return y

    def _fits(self, x: Tensor) -> bool:
        weight, bias = self.weight, self.bias
        if (
            weight is None
            or bias is None
            or weight.dim() != 1
            or weight.requires_grad
            or bias.requires_grad
        ):
            return False
        if not usable(x):
            return False
        from dpfed.accel import norm

        return norm.fits(x, weight, bias)


def fuse_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = FusedLayerNorm

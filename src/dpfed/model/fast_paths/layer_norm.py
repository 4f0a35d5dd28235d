"""Layer normalisation with frozen weights by the Triton kernels of `accel`, for short rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfed.accel.operators.norm import frozen_layer_norm


class FusedLayerNorm(nn.LayerNorm):
    """A LayerNorm that uses the kernels of `accel` while its weights are frozen.

    In compiled code PyTorch's layer runs instead, because the compiler generates a kernel for it.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        frozen = (
            weight is not None
            and bias is not None
            and weight.dim() == 1
            and not weight.requires_grad
            and not bias.requires_grad
        )
        if torch.compiler.is_compiling() or not frozen:
            return super().forward(x)
        return frozen_layer_norm(x, weight, bias, self.eps)


def fuse_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = FusedLayerNorm

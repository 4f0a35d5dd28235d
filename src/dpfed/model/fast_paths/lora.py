"""A faster version of peft's linear LoRA layers, by the operator in `accel.operators.lora`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel.operators.lora import LoraProduct, declare_product_cost
from dpfed.model.per_sample.derived_class import derived, once_per_class


def fuse_lora(model: nn.Module) -> None:
    """Make peft's linear LoRA layers use the operator `accel.operators.lora`, in place.

    The classes of the layers are replaced. The operator runs if a layer has one active adapter
    without dropout, and each sample has its own adapter weights. Otherwise peft's code runs. In
    compiled code on a CPU peft's code runs too, because the kernels need a GPU.
    """
    # If peft was not imported, the model has no LoRA layer. An import here would take a second.
    if "peft" not in sys.modules:
        return
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.__class__ = _fused_adapter(Linear)
            declare_product_cost()


@once_per_class
def _fused_adapter(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in self.active_adapters if name in self.lora_A]
        plain = self.disable_adapters or self.merged or self.lora_variant or args or kwargs
        if plain or len(names) != 1 or not _fits(self, names[0], x):
            return cls.forward(self, x, *args, **kwargs)
        if torch.compiler.is_compiling() and not x.is_cuda:
            return cls.forward(self, x, *args, **kwargs)
        a, b = self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
        rows = x.reshape(len(b), -1, x.shape[-1]).contiguous()
        operands = rows, self.base_layer.weight, self.base_layer.bias, a, b, self.scaling[names[0]]
        if torch.compiler.is_compiling():
            y, _ = torch.ops.dpfed.lora_product(*operands)
        else:
            y = LoraProduct.apply(*operands)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])

    return derived(cls, "Fused", forward=forward)


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

"""Gradient checkpointing: layers keep only their inputs and compute the rest again for gradients.

Chen, Xu, Zhang, Guestrin: Training deep nets with sublinear memory cost, 2016. The checkpointing in
the transformers library would repeat a layer with the model's plain weights. Here the layer
remembers each record's copy of its weights and each record's dropout key. The second computation is
therefore bitwise equal to the first.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfed.errors import DpfedError
from dpfed.model.per_sample.compiled import repeated_layers
from dpfed.model.per_sample.derived_class import derived, once_per_class


def checkpoint_layers(model: nn.Module) -> None:
    """Make the model's repeated layers checkpointed, by replacing their classes in place.

    Raise DpfedError for a model without repeated layers.
    """
    layers = repeated_layers(model)
    if not layers:
        raise DpfedError(
            f"model.gradient_checkpointing = true needs repeated layers, and "
            f"{type(model).__name__} has none: leave it out"
        )
    for layer in layers:
        layer.__class__ = _checkpointed(type(layer))


@once_per_class
def _checkpointed(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In compiled code the compiler itself stores the inputs and computes the rest again
        # (per_sample/compiled.py).
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        # A shallow copy has the modules and tensors of this layer, but the layer's original class.
        # Its forward pass therefore does not call this function again.
        plain = copy.copy(self)
        plain.__class__ = cls
        # One tensor may have several names, as a tied weight or the key of all dropout layers.
        # Collect it under every name.
        weights = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

        def compute(*args: Any) -> Any:
            return torch.func.functional_call(plain, weights, args, kwargs)

        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)

    return derived(cls, "Checkpointed", forward=forward)

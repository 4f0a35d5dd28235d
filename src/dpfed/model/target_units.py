"""Convert a regression head between standardised numbers and the user's own unit.

Training uses standardised numbers, (number - center) / scale, where `center` and `scale` are public
settings. An exported model of transformers gives numbers in the user's unit, as plain transformers
expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpfed.model.task import InputSpec


def can_convert(model: nn.Module, head: str) -> bool:
    """Return True if the output of the model can be converted by a change of its last layer.

    It can for a model of transformers whose last linear layer has a bias.
    """
    layer = _last_layer(model, head) if hasattr(model, "config") else None
    return layer is not None and layer.bias is not None


def to_user_unit(model: nn.Module, head: str, spec: InputSpec) -> None:
    """Change the head so that the model gives numbers in the user's unit, if this is possible."""
    if can_convert(model, head):
        _change_output(_last_layer(model, head), spec.scale, spec.center)


def to_standard_unit(model: nn.Module, head: str, spec: InputSpec) -> None:
    """Change a head that gives numbers in the user's unit so that it gives standardised numbers.

    A new head, which has only zeros, is left unchanged.
    """
    layer = _last_layer(model, head)
    if can_convert(model, head) and (layer.weight.is_meta or bool(layer.weight.any())):
        _change_output(layer, 1 / spec.scale, -spec.center / spec.scale)


def _change_output(layer: nn.Linear, factor: float, offset: float) -> None:
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.mul_(factor).add_(offset)


def _last_layer(model: nn.Module, head: str) -> Any:
    """Return the last linear layer of the module `head`, which computes the output of the model.

    If peft trains a copy of this module in its place, return the layer of the copy. Return None if
    there is no linear layer.
    """
    module = model.get_submodule(head)
    copies = getattr(module, "modules_to_save", None)
    if copies is not None:
        module = next(iter(copies.values()))
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return layers[-1] if layers else None

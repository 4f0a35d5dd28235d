"""Hash everything of a model that is not trained, so that two parties can compare their models."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dpfed.model.parameter_vector import Space


def model_hash(model: nn.Module, space: Space, skip_replaced: bool = False) -> str:
    """Hash names, shapes and bytes of frozen tensors, and names and shapes of trained ones.

    skip_replaced  ignore the originals of modules that peft has replaced by trained copies
    """
    digest = hashlib.sha256()
    frozen = {name: p for name, p in model.named_parameters() if name not in space.names}
    for name, value in sorted({**frozen, **dict(model.named_buffers())}.items()):
        if skip_replaced and ".original_module." in f".{name}":
            continue
        value = value.detach().cpu().contiguous()
        digest.update(f"frozen {name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    for name, shape in zip(space.names, space.shapes, strict=True):
        digest.update(f"trained {name} {tuple(shape)}\n".encode())
    return digest.hexdigest()

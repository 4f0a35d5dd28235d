"""What a model is, for two parties who must mean the same one: the hash of all that is not trained."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dpfed.model.parameter_vector import Space


def model_hash(model: nn.Module, space: Space) -> str:
    """Over names, shapes and bytes of frozen weights and buffers, and over names and shapes of what is trained."""
    found = hashlib.sha256()
    frozen = {name: p for name, p in model.named_parameters() if name not in space.names}
    for name, value in sorted({**frozen, **dict(model.named_buffers())}.items()):
        value = value.detach().cpu().contiguous()
        found.update(f"frozen {name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(
            value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    for name, shape in zip(space.names, space.shapes, strict=True):
        found.update(f"trained {name} {tuple(shape)}\n".encode())
    return found.hexdigest()

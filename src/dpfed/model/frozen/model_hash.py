"""A hash of a model's frozen tensors, by which client and server compare their models."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.model.frozen.quantised import stored_tensors
from dpfed.model.parameter_vector import Space


def model_hash(model: nn.Module, space: Space, skip_replaced: bool = False) -> str:
    """Return a SHA-256 hash of a model, which does not depend on the values of trainable tensors.

    The hash covers names and shapes of all tensors, and the bytes of the frozen tensors.

    space          names and shapes of the trainable tensors
    skip_replaced  True leaves out original modules that peft has replaced by trainable copies
    """
    digest = hashlib.sha256()
    frozen = {name: p for name, p in model.named_parameters() if name not in space.names}
    for owner, value in sorted({**frozen, **dict(model.named_buffers())}.items()):
        if skip_replaced and ".original_module." in f".{owner}":
            continue
        for name, part in stored_tensors(owner, value).items():
            _add_frozen(digest, name, part)
    for name, shape in zip(space.names, space.shapes, strict=True):
        digest.update(f"trained {name} {tuple(shape)}\n".encode())
    return digest.hexdigest()


def _add_frozen(digest: Any, name: str, value: Tensor) -> None:
    value = value.detach().cpu().contiguous()
    digest.update(f"frozen {name} {value.dtype} {tuple(value.shape)}\n".encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().data)

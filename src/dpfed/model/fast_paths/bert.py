"""Twins for the attention of BERT and RoBERTa: the same numbers by one kernel, where heads are small and texts short.

Each record is a window of its own to the kernel (`windows.py`). Whatever does not fit goes the way of transformers: larger
heads (RoBERTa-base), longer texts, decoders, dropout of probabilities, probabilities that someone wants to see.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel import TRITON
from dpfed.model.fast_paths.windows import (
    DEEPEST,
    LARGEST,
    TYPES,
    available,
    declare_cost,
    window_attention,
)
from dpfed.model.per_sample.keyed_dropout import once

HOMES = {
    "FusedBertSelfAttention": "transformers.models.bert.modeling_bert",
    "FusedRobertaSelfAttention": "transformers.models.roberta.modeling_roberta",
}
UNREAD = {"encoder_hidden_states", "position_ids"}
"""Arguments that the plain way takes and does not look at either."""


def fuse_bert(model: nn.Module) -> None:
    """Exchanges the classes of self-attention."""
    for module in model.modules():
        cls = type(module)
        if cls.__module__ == HOMES.get(f"Fused{cls.__name__}"):
            module.__class__ = _attention_twin(cls)
            if TRITON:
                declare_cost()


@once
def _attention_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        asked = [
            name for name, x in kwargs.items() if not (x is None or x is False or name in UNREAD)
        ]
        if (
            asked
            or past_key_values is not None
            or not _fits(self, hidden_states)
            or not _mask_fits(attention_mask, hidden_states, self.config._attn_implementation)
        ):
            return cls.forward(self, hidden_states, attention_mask, past_key_values, **kwargs)
        q, k, v = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        return window_attention(
            q, k, v, None, _added(attention_mask), self.scaling, self.num_attention_heads
        ), None

    return type(f"Fused{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__})


def _fits(attention: Any, x: Tensor) -> bool:
    return bool(
        available(x)
        and x.dim() == 3
        and x.shape[1] <= LARGEST
        and attention.attention_head_size <= DEEPEST
        and not attention.is_decoder
        and not attention.is_causal
        and not (attention.training and attention.dropout.p)
        and not attention.config.output_attentions
        and attention.config._attn_implementation in ("sdpa", "eager")
    )


def _mask_fits(mask: Tensor | None, x: Tensor, way: str) -> bool:
    """Of all heads alike, `[M or 1, 1, n or 1, n]`. Eager attention would add booleans as numbers, so they are left to it."""
    if mask is None:
        return True
    samples, n, _ = x.shape
    return (
        mask.dim() == 4
        and mask.shape[0] in (1, samples)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, n)
        and mask.shape[3] == n
        and (mask.dtype in TYPES or (mask.dtype == torch.bool and way == "sdpa"))
        and mask.device == x.device
        and not mask.requires_grad
    )


def _added(mask: Tensor | None) -> Tensor | None:
    """`[kinds, 1 or n, n]`, to be added to the scores."""
    if mask is None:
        return None
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask


def __getattr__(name: str) -> Any:
    """The twins are made when they are asked for; so a pickled model finds its classes again."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _attention_twin(getattr(import_module(HOMES[name]), name.removeprefix("Fused")))

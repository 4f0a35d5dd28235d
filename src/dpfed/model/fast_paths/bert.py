"""Self-attention of BERT and RoBERTa in one Triton kernel, for small heads and short texts.

The kernel treats each record as one window, a group of positions that attend only to one another.
In all other cases the code of transformers runs: for large heads (RoBERTa-base), long texts,
decoders, dropout of attention probabilities, and models that return these probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel import FLOATS
from dpfed.accel.operators.attention import (
    MAX_DEPTH,
    MAX_POSITIONS,
    available,
    declare_attention_cost,
    window_attention,
)
from dpfed.model.per_sample.derived_class import derived, once_per_class

LAYERS = {
    "transformers.models.bert.modeling_bert.BertSelfAttention",
    "transformers.models.roberta.modeling_roberta.RobertaSelfAttention",
}
# BERT's attention in transformers accepts these arguments and ignores them. The faster version may
# therefore ignore them too.
UNREAD = {"encoder_hidden_states", "position_ids"}


def fuse_bert(model: nn.Module) -> None:
    for module in model.modules():
        cls = type(module)
        if f"{cls.__module__}.{cls.__name__}" in LAYERS:
            module.__class__ = _fused_attention(cls)
            declare_attention_cost()


@once_per_class
def _fused_attention(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        others = [x for name, x in kwargs.items() if name not in UNREAD]
        if (
            not all(x is None or x is False for x in others)
            or past_key_values is not None
            or not _fits(self, hidden_states)
            or not _mask_fits(attention_mask, hidden_states, self.config._attn_implementation)
        ):
            return cls.forward(self, hidden_states, attention_mask, past_key_values, **kwargs)
        q, k, v = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        mask = _additive(attention_mask)
        y = window_attention(q, k, v, None, mask, self.scaling, self.num_attention_heads)
        return y, None

    return derived(cls, "Fused", forward=forward)


def _fits(attention: Any, x: Tensor) -> bool:
    return bool(
        available(x)
        and x.dim() == 3
        and x.shape[1] <= MAX_POSITIONS
        and attention.attention_head_size <= MAX_DEPTH
        and not attention.is_decoder
        and not attention.is_causal
        and not (attention.training and attention.dropout.p)
        and not attention.config.output_attentions
        and attention.config._attn_implementation in ("sdpa", "eager")
    )


def _mask_fits(mask: Tensor | None, x: Tensor, implementation: str) -> bool:
    """Return True if the kernel accepts the attention mask: None, or the same mask for all heads.

    The mask has the shape `[M, 1, n, n]`, for M records with n positions each. The first and the
    third axis may have length 1. A boolean mask is accepted only for the implementation "sdpa".
    Eager attention adds a boolean mask to the scores as the numbers 0 and 1, which the kernel does
    not do.
    """
    if mask is None:
        return True
    samples, n, _ = x.shape
    return (
        mask.dim() == 4
        and mask.shape[0] in (1, samples)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, n)
        and mask.shape[3] == n
        and (mask.dtype in FLOATS or (mask.dtype == torch.bool and implementation == "sdpa"))
        and mask.device == x.device
        and not mask.requires_grad
    )


def _additive(mask: Tensor | None) -> Tensor | None:
    """Return the attention mask as numbers to add to the attention scores; None without a mask.

    The shape is `[M or 1, 1 or n, n]`, for M records with n positions each.
    """
    if mask is None:
        return None
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask

"""A text classifier on pooled token vectors, as sentence encoders need it.

This file imports nothing of dpfed: exports contain a copy of it, and plain transformers loads them
with `trust_remote_code=True`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class PooledConfig(PretrainedConfig):  # type: ignore[misc]
    """Configuration of a text classifier that pools an encoder's token vectors into one vector.

    text_config  configuration of the encoder
    pooling      "mean" over unmasked tokens, or "cls": the first unmasked token
    normalize    scale the pooled vector to length sqrt(width)
    """

    # With a new model type, transformers refuses the folder if this file is missing. With the
    # encoder's type it would load the encoder with a wrong head.
    model_type = "pooled-text"

    def __init__(
        self,
        text_config: PretrainedConfig | dict[str, Any] | None = None,
        pooling: str = "mean",
        normalize: bool = False,
        **kwargs: Any,
    ) -> None:
        self.text_config: Any = text_config
        if isinstance(text_config, dict):
            self.text_config = AutoConfig.for_model(**text_config)
        self.pooling = pooling
        self.normalize = normalize
        super().__init__(**kwargs)


class PooledForSequenceClassification(PreTrainedModel):  # type: ignore[misc]
    """A text classifier: one linear layer on the pooled token vectors of an encoder."""

    config_class = PooledConfig
    base_model_prefix = "body"
    _supports_sdpa = True

    def __init__(self, config: PooledConfig) -> None:
        super().__init__(config)
        self.body = AutoModel.from_config(config.text_config, trust_remote_code=False)
        if getattr(self.body, "pooler", None) is not None:
            # Remove the pooler: its output is not used, so its weights cannot be trained.
            self.body.pooler = None
        self.classifier = nn.Linear(config.text_config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return the logits of each record, and their mean loss where labels are given.

        `config.problem_type` chooses the loss, as in transformers.
        """
        kwargs["return_dict"] = True
        tokens = self.body(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        pooled = self.pool(tokens.last_hidden_state, attention_mask)
        logits = self.classifier(pooled)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pool(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return one vector for each of M records, `[M, L, D]` -> `[M, D]`, without padding."""
        real = unmasked(tokens, attention_mask)
        if self.config.pooling == "cls":
            pooled = tokens[torch.arange(len(tokens), device=tokens.device), real.int().argmax(1)]
        else:
            # Add half-precision vectors in float32, because a half-precision sum would lose digits.
            exact = torch.promote_types(tokens.dtype, torch.float32)
            count = real.sum(1, keepdim=True).clamp_min(1)
            pooled = (tokens * real.unsqueeze(-1)).sum(1, dtype=exact) / count
        if self.config.normalize:
            pooled = F.normalize(pooled, dim=-1) * pooled.shape[-1] ** 0.5
        return pooled.to(tokens.dtype)


def unmasked(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return True for each token that is not padding: `[M, L]` for M records of L tokens.

    The mask is `[M, L]` with 1 for a token, or `[M, 1, 1 or L, L]`. The second form has 0 for a
    visible token and the lowest number elsewhere, and its last row shows every token.
    """
    if attention_mask is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if attention_mask.dim() == 2:
        return attention_mask.bool()
    return attention_mask[:, 0, -1] == 0

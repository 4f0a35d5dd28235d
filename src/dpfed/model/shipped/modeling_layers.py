"""A classifier on the mean outputs of all layers of an image or text encoder.

This file imports nothing of dpfed: exports contain a copy of it, and plain transformers loads them
with `trust_remote_code=True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput

# Squared norm of the joined vectors of all layers but the last. The last layer's vector has norm 1.
EARLIER = 0.5


class LayersConfig(PretrainedConfig):  # type: ignore[misc]
    """Configuration of a classifier on all layers of an encoder.

    body_config  configuration of the encoder
    widths       width of each layer's vector; the last one is that of the encoder's output
    """

    model_type = "all-layers"

    def __init__(
        self,
        body_config: PretrainedConfig | dict[str, Any] | None = None,
        widths: Sequence[int] = (1,),
        **kwargs: Any,
    ) -> None:
        self.body_config: Any = body_config
        if isinstance(body_config, dict):
            self.body_config = AutoConfig.for_model(**body_config)
        self.widths = list(widths)
        super().__init__(**kwargs)


class LayersClassifier(PreTrainedModel):  # type: ignore[misc]
    """A classifier: one linear layer on the mean outputs of all layers of an encoder.

    The joined means of a record are its features. Before the linear layer, `center` is subtracted
    and the result is multiplied by `scale`.

    center  mean of the layers' vectors over public records
    scale   factor that gives the features of public records a root mean square norm of 10
    """

    config_class = LayersConfig
    base_model_prefix = "body"
    _supports_sdpa = True

    def __init__(self, config: LayersConfig) -> None:
        super().__init__(config)
        self.body = AutoModel.from_config(config.body_config, trust_remote_code=False)
        if getattr(self.body, "pooler", None) is not None:
            # Remove the pooler: its output is not used, so its weights cannot be trained.
            self.body.pooler = None
        width = sum(config.widths)
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("scale", torch.ones(1))
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

    def logits(self, **inputs: Any) -> Tensor:
        """Return the logits of M records, `[M, classes]`."""
        features = (joined(self.body, **inputs) - self.center) * self.scale
        logits: Tensor = self.classifier(features)
        return logits

    def loss(self, labels: Tensor | None, logits: Tensor) -> Tensor | None:
        """Return the mean loss where labels are given; `config.problem_type` chooses the loss."""
        return None if labels is None else self.loss_function(labels, logits, self.config)


class LayersForSequenceClassification(LayersClassifier):
    """A classifier on all layers of a text encoder."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return the logits of each record, and their mean loss where labels are given."""
        logits = self.logits(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        return SequenceClassifierOutput(loss=self.loss(labels, logits), logits=logits)


class LayersForImageClassification(LayersClassifier):
    """A classifier on all layers of an image encoder."""

    main_input_name = "pixel_values"

    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Return the logits of each record, and their mean loss where labels are given."""
        logits = self.logits(pixel_values=pixel_values, **kwargs)
        return ImageClassifierOutput(loss=self.loss(labels, logits), logits=logits)


def joined(body: nn.Module, **inputs: Any) -> Tensor:
    """Return the vectors of an encoder's layers, joined to one row for each record.

    Each layer's vector is first scaled to mean 0 and to a fixed norm, so that no layer with large
    numbers outweighs the others.
    """
    pooled = pooled_layers(body, **inputs)
    earlier = (EARLIER / max(len(pooled) - 1, 1)) ** 0.5
    weights = [earlier] * (len(pooled) - 1) + [1.0]
    parts = [
        weight * F.layer_norm(x, x.shape[1:]) / x.shape[1] ** 0.5
        for weight, x in zip(weights, pooled, strict=True)
    ]
    return torch.cat(parts, 1)


def pooled_layers(body: nn.Module, **inputs: Any) -> list[Tensor]:
    """Return each layer's mean output over the tokens or pixels of each record, `[M, width]`.

    The last element is the mean of the encoder's final output.
    """
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in layers_of(body)[:-1]]
    try:
        last = body(**inputs, return_dict=True).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return [pool(output, inputs.get("attention_mask")) for output in [*found, last]]


def layers_of(body: nn.Module) -> list[nn.Module]:
    """Return the encoder's layers: the elements of each ModuleList that contains no ModuleList."""
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m)]
    inner = [m for m in lists if not any(other in lists for other in list(m.modules())[1:])]
    return [layer for found in inner for layer in found]


def pool(output: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return each record's mean vector `[M, D]` over its tokens or pixels, without padding.

    output  vectors of L tokens `[M, L, D]`, or of pixels `[M, D, H, W]`, for M records
    """
    if output.dim() == 4:
        return output.mean((2, 3))
    if attention_mask is None:
        return output.mean(1)
    real = unmasked(attention_mask)
    # Add half-precision vectors in float32, because a half-precision sum would lose digits.
    exact = torch.promote_types(output.dtype, torch.float32)
    count = real.sum(1, keepdim=True).clamp_min(1)
    return ((output * real.unsqueeze(-1)).sum(1, dtype=exact) / count).to(output.dtype)


def unmasked(attention_mask: Tensor) -> Tensor:
    """Return True for each token that is not padding: `[M, L]` for M records of L tokens.

    The mask is `[M, L]` with 1 for a token, or `[M, 1, 1 or L, L]`. The second form has 0 for a
    visible token and the lowest number elsewhere, and its last row shows every token.
    """
    if attention_mask.dim() == 2:
        return attention_mask.bool()
    return attention_mask[:, 0, -1] == 0

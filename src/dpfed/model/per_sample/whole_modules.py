"""Twins of modules that must be mapped over records as a whole.

Inside them activations do not lead with the record axis: tokens come first, or a table of relative
positions is shared by all records. So their inner layers cannot tell the records apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpfed.model.per_sample.batched_layers import install_batched_layer, loop_layer, vmap_layer
from dpfed.model.per_sample.keyed_dropout import once


def map_whole_modules(model: nn.Module, trained: set[int]) -> None:
    """Exchange the classes of modules that hold a trained tensor; `trained` are ids of tensors."""
    for module in model.modules():
        make = WHOLE.get(f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}")
        if make is None or not any(id(p) in trained for p in module.parameters()):
            continue
        mapped: Any = module
        mapped._plain_dims = {name: p.dim() for name, p in module.named_parameters()}
        install_batched_layer(module, make(type(module)))


@once
def _relative_twin(cls: type[nn.Module]) -> type[nn.Module]:
    """DeBERTa's attention; its table of relative positions comes as `[1 or M, rows, width]`."""

    def single(self: Any, *args: Any, rel_embeddings: Tensor | None = None, **kwargs: Any) -> Any:
        if rel_embeddings is not None:
            rel_embeddings = rel_embeddings[0]
        return cls.forward(self, *args, rel_embeddings=rel_embeddings, **kwargs)

    mapped = vmap_layer(type(cls.__name__, (cls,), {"forward": single, "__module__": __name__}))

    def forward(self: Any, *args: Any, rel_embeddings: Tensor | None = None, **kwargs: Any) -> Any:
        if rel_embeddings is not None and rel_embeddings.dim() == 2:
            rel_embeddings = rel_embeddings.unsqueeze(0)
        return mapped.forward(self, *args, rel_embeddings=rel_embeddings, **kwargs)

    return type(f"Twin{cls.__name__}", (mapped,), {"forward": forward, "__module__": __name__})


@once
def _mpnet_twin(cls: type[nn.Module]) -> type[nn.Module]:
    """MPNet's encoder, whose table of position biases is read without a record's input."""
    plain: Any = cls

    def compute_position_bias(
        self: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> Tensor:
        table: Tensor = self.relative_attention_bias.weight
        if table.dim() == 2:
            bias: Tensor = plain.compute_position_bias(self, x, position_ids, num_buckets)
            return bias
        at = torch.arange(x.shape[1], device=x.device)
        buckets = self.relative_position_bucket(at[None, :] - at[:, None], num_buckets=num_buckets)
        return table[:, buckets].permute(0, 3, 1, 2)

    methods = {"compute_position_bias": compute_position_bias, "__module__": __name__}
    return type(f"Twin{cls.__name__}", (cls,), methods)


WHOLE = {
    "modeling_longformer.LongformerSelfAttention": loop_layer,
    "modeling_deberta.DisentangledSelfAttention": _relative_twin,
    "modeling_deberta_v2.DisentangledSelfAttention": _relative_twin,
    "modeling_mpnet.MPNetEncoder": _mpnet_twin,
    # `vmap` would give the padding row of its table a gradient.
    "quant_modules.QuantEmbedding": loop_layer,
}

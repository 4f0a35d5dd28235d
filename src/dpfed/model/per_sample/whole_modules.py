"""Batched versions of modules whose inner layers cannot be made batched one by one.

A batched module accepts one copy of its weights per record. Inside these modules the first axis of
activations does not hold records. It may hold tokens, or belong to a table of relative positions
that all records share. Most of these modules are therefore called as a whole for each record, by
`vmap` or by a loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpfed.model.per_sample.batched_layers import loop_layer, vmap_layer
from dpfed.model.per_sample.derived_class import derived, once_per_class


def map_whole_modules(model: nn.Module, trained: set[int]) -> None:
    """Let the modules in `WHOLE` that hold a trained tensor accept one copy of it per record.

    The classes of these modules are replaced in place.

    trained  the `id` of each trained tensor
    """
    for module in model.modules():
        make = WHOLE.get(f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}")
        if make is None or not any(id(p) in trained for p in module.parameters()):
            continue
        mapped: Any = module
        mapped._plain_dims = {name: p.dim() for name, p in module.named_parameters()}
        module.__class__ = make(type(module))


@once_per_class
def _batched_deberta(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of DeBERTa's attention that accepts one copy of its weights per record.

    The attention has a table of relative positions, `[rows, width]`. The subclass also accepts one
    copy of the table for each of M records, `[M, rows, width]`.
    """

    def single(self: Any, *args: Any, rel_embeddings: Tensor | None = None, **kwargs: Any) -> Any:
        if rel_embeddings is not None:
            rel_embeddings = rel_embeddings[0]
        return cls.forward(self, *args, rel_embeddings=rel_embeddings, **kwargs)

    mapped = vmap_layer(derived(cls, "", forward=single))

    def forward(self: Any, *args: Any, rel_embeddings: Tensor | None = None, **kwargs: Any) -> Any:
        if rel_embeddings is not None and rel_embeddings.dim() == 2:
            rel_embeddings = rel_embeddings.unsqueeze(0)
        return mapped.forward(self, *args, rel_embeddings=rel_embeddings, **kwargs)

    return derived(mapped, "Batched", forward=forward)


@once_per_class
def _batched_mpnet(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of MPNet's encoder that accepts one copy of its weights per record.

    The plain encoder reads one table of position biases for all records. In the subclass each
    record reads its own copy of the table.
    """
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

    return derived(cls, "Batched", compute_position_bias=compute_position_bias)


WHOLE = {
    "modeling_longformer.LongformerSelfAttention": loop_layer,
    "modeling_deberta.DisentangledSelfAttention": _batched_deberta,
    "modeling_deberta_v2.DisentangledSelfAttention": _batched_deberta,
    "modeling_mpnet.MPNetEncoder": _batched_mpnet,
    # With `vmap` the padding row of the embedding table would get a gradient, which it must not
    # have. Use a loop over the records.
    "quant_modules.QuantEmbedding": loop_layer,
}

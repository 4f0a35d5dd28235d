"""Twins for the layers of a Swin: the same numbers with fewer passes over memory.

Attention goes by kernels where they are available. What depends on nothing but shapes, or on frozen weights, is computed once:
the mask of shifted windows, the order of patches in them, the position bias. Nothing is copied where nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel import TRITON
from dpfed.model.fast_paths.windows import (
    DEEPEST,
    LARGEST,
    available,
    declare_cost,
    reorder,
    window_attention,
)
from dpfed.model.per_sample.keyed_dropout import once

Size = tuple[int, int]
HOME = "transformers.models.swin.modeling_swin"


def fuse_windows(model: nn.Module) -> None:
    """Exchanges the classes of a Swin's parts. A trained position bias has a twin already, and keeps it."""
    for module in model.modules():
        maker = _MAKERS.get(f"Fused{type(module).__name__}")
        if maker and type(module).__module__ == HOME:
            module.__class__ = maker(type(module))
            if TRITON:
                declare_cost()


@once
def _attention_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if kwargs.get("output_attentions") or not _fits(self, hidden_states):
            return cls.forward(self, hidden_states, attention_mask, **kwargs)
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        y = window_attention(q, k, v, _bias(self), attention_mask, self.scaling)
        return self.o_proj(y), None

    return _named(cls, {"forward": forward})


def _fits(attention: Any, x: Tensor) -> bool:
    bias = attention.relative_position_bias
    table = bias.relative_position_bias_table
    return bool(
        available(x)
        and table.dim() == 2
        and not table.requires_grad
        and x.shape[1] == bias.window_area <= LARGEST
        and attention.head_dim <= DEEPEST
        and not (attention.training and attention.attention_dropout)
    )


def _bias(attention: Any) -> Tensor:
    """`[heads, n, n]`, kept beside the table it was made of: a table that was replaced, moved or written to makes it anew (not
    one that was written to through `.data`, which leaves no trace)."""
    bias = attention.relative_position_bias
    table = bias.relative_position_bias_table
    if torch.compiler.is_compiling() or table.is_inference():
        return bias()[0]  # type: ignore[no-any-return]
    kept = attention.__dict__.get("_kept_bias")
    # the kept alias holds the table's memory, so that no other table can be at its address
    if (
        kept
        and kept[0].data_ptr() == table.data_ptr()
        and kept[0].dtype == table.dtype
        and kept[1] == table._version
    ):
        return kept[2]  # type: ignore[no-any-return]
    if _capturing(table.device):
        return bias()[0]  # type: ignore[no-any-return]
    attention._kept_bias = (
        table.detach(),
        table._version,
        _settled(lambda: bias()[0], table.device),
    )
    return attention._kept_bias[2]  # type: ignore[no-any-return]


@once
def _layer_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        input_dimensions: Size,
        always_partition: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not always_partition:
            self.set_shift_and_window_size(input_dimensions)
        # a compiler makes one pass of norm, shift and windows by itself
        orders = (
            None
            if torch.compiler.is_compiling()
            else _orders(self, hidden_states, input_dimensions)
        )
        if orders is None:
            return cls.forward(
                self, hidden_states, input_dimensions, always_partition=always_partition, **kwargs
            )
        inward, outward = orders
        x = reorder(self.layernorm_before(hidden_states), inward, outward)
        mask = self.get_attn_mask(*input_dimensions, dtype=x.dtype, device=x.device)
        y, weights = self.attention(x.view(-1, self.window_size**2, x.shape[2]), mask, **kwargs)
        y = reorder(self.dropout(y).view(x.shape), outward, inward)
        hidden_states = hidden_states + self.drop_path(y)
        y = self.mlp(self.layernorm_after(hidden_states))
        return self.dropout(y) + hidden_states, weights

    def maybe_pad(
        self: Any, hidden_states: Tensor, height: int, width: int
    ) -> tuple[Tensor, tuple[int, ...]]:
        if height % self.window_size or width % self.window_size:
            return cls.maybe_pad(self, hidden_states, height, width)  # type: ignore[attr-defined,no-any-return]
        return hidden_states, (0,) * 6

    def get_attn_mask(
        self: Any, height: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        def make() -> Tensor:
            return cls.get_attn_mask(self, height, width, dtype=dtype, device=device)  # type: ignore[attr-defined,no-any-return]

        if self.shift_size <= 0 or torch.compiler.is_compiling():
            return make()
        mask = _kept(
            ("mask", height, width, self.window_size, self.shift_size, dtype), make, device
        )
        return make() if mask is None else mask

    return _named(cls, {"forward": forward, "maybe_pad": maybe_pad, "get_attn_mask": get_attn_mask})


@once
def _merging_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, input_feature: Tensor, input_dimensions: Size) -> Any:
        """Four neighbours side by side are an order of rows; as slices, each has a gradient of the whole size."""
        (height, width), (samples, _, channels) = input_dimensions, input_feature.shape
        if height % 2 or width % 2:
            return cls.forward(self, input_feature, input_dimensions)

        def merged(x: Tensor) -> Tensor:
            return x.view(-1, height // 2, 2, width // 2, 2, x.shape[-1]).permute(0, 1, 3, 4, 2, 5)

        orders = None
        if available(input_feature) and not torch.compiler.is_compiling():
            orders = _order(("merged", height, width), height * width, merged, input_feature.device)
        x = merged(input_feature) if orders is None else reorder(input_feature, *orders)
        return self.reduction(self.norm(x.reshape(samples, -1, 4 * channels)))

    return _named(cls, {"forward": forward})


@once
def _stage_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def get_reshaped_hidden_states(
        self: Any, hidden_states: Tensor, before: Tensor, height: int, width: int, is_before: bool
    ) -> Tensor:
        """As a view: hardly anyone reads it, and a copy is a pass over all activations."""
        merged = self.downsample is not None and not is_before
        size = ((height + 1) // 2, (width + 1) // 2) if merged else (height, width)
        x = before if is_before else hidden_states
        return x.view(len(x), *size, x.shape[2]).permute(0, 3, 1, 2)

    return _named(cls, {"get_reshaped_hidden_states": get_reshaped_hidden_states})


def _orders(layer: Any, x: Tensor, size: Size) -> tuple[Tensor, Tensor] | None:
    """Where each position of the windows comes from in the image, and the inverse; None where the plain way is to be gone."""
    window, shift, (height, width) = layer.window_size, layer.shift_size, size
    if (
        height % window
        or width % window
        or not available(x)
        or (shift == 0 and height == width == window)
    ):
        return None

    def windows(raster: Tensor) -> Tensor:
        shifted = raster.view(height, width).roll((-shift, -shift), (0, 1))
        return shifted.view(height // window, window, width // window, window).transpose(1, 2)

    return _order(("windows", height, width, window, shift), height * width, windows, x.device)


def _order(
    key: tuple[Any, ...], count: int, place: Callable[[Tensor], Tensor], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """The order in which `place` puts rows, and its inverse."""

    def make() -> tuple[Tensor, Tensor]:
        rows = torch.arange(count, device=device)
        order = place(rows.unsqueeze(-1)).reshape(-1)
        return order, torch.empty_like(order).scatter_(0, order, rows)

    return _kept(key, make, device)  # type: ignore[no-any-return]


_KEPT: dict[tuple[Any, ...], Any] = {}
"""Small tensors that follow from their keys alone. None is ever given up: captured steps read them where they are."""


def _kept(key: tuple[Any, ...], make: Callable[[], Any], device: torch.device) -> Any:
    """What was made for the key, or None while a step is captured that was not warmed up: nothing is computed then."""
    if (key, device) not in _KEPT:
        if _capturing(device):
            return None
        return _KEPT.setdefault(
            (key, device), _settled(make, device)
        )  # whoever was first has perhaps captured it
    return _KEPT[key, device]


def _settled(make: Callable[[], Any], device: torch.device) -> Any:
    """Made in such a way that any later pass may use it, with gradients or on another stream."""
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return made


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _named(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    return type(f"Fused{cls.__name__}", (cls,), {**members, "__module__": __name__})


_MAKERS = {
    "FusedSwinAttention": _attention_twin,
    "FusedSwinLayer": _layer_twin,
    "FusedSwinPatchMerging": _merging_twin,
    "FusedSwinStage": _stage_twin,
}


def __getattr__(name: str) -> Any:
    """The twins are made when they are asked for; so a pickled model finds its classes again."""
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.models.swin import modeling_swin

    return _MAKERS[name](getattr(modeling_swin, name.removeprefix("Fused")))

"""Faster versions of Swin's layers, which read and write memory less often.

Attention runs in Triton kernels where they are available. Tensors that depend only on shapes or on
frozen weights are computed once: the mask of shifted windows, the order of patches, the position
bias. Images that need no padding are not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel.operators.attention import (
    MAX_DEPTH,
    MAX_POSITIONS,
    available,
    declare_attention_cost,
    reorder,
    window_attention,
)
from dpfed.model.per_sample.derived_class import derived, once_per_class

Size = tuple[int, int]
MODULE = "transformers.models.swin.modeling_swin"


def fuse_windows(model: nn.Module) -> None:
    """Replace the classes of Swin's layers by the faster classes of this module, in place.

    Attention whose position bias is trained still runs the code of transformers.
    """
    for module in model.modules():
        cls = type(module)
        if cls.__module__ == MODULE and cls.__name__ in _FUSED:
            module.__class__ = _FUSED[cls.__name__](cls)
            declare_attention_cost()


@once_per_class
def _fused_attention(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if kwargs.get("output_attentions") or not _fits(self, hidden_states):
            return cls.forward(self, hidden_states, attention_mask, **kwargs)
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        y = window_attention(q, k, v, _bias(self), attention_mask, self.scaling)
        return self.o_proj(y), None

    return derived(cls, "Fused", forward=forward)


def _fits(attention: Any, x: Tensor) -> bool:
    bias = attention.relative_position_bias
    table = bias.relative_position_bias_table
    return bool(
        available(x)
        and table.dim() == 2
        and not table.requires_grad
        and x.shape[1] == bias.window_area <= MAX_POSITIONS
        and attention.head_dim <= MAX_DEPTH
        and not (attention.training and attention.attention_dropout)
    )


def _bias(attention: Any) -> Tensor:
    """Return the position bias `[heads, n, n]` for windows of n positions.

    The bias is computed from a table of weights and stored. It is computed again if the table of
    weights is replaced, moved or written to. A write through `.data` cannot be detected; the stored
    bias then remains in use.
    """
    bias = attention.relative_position_bias
    table = bias.relative_position_bias_table
    if torch.compiler.is_compiling() or table.is_inference():
        return bias()[0]  # type: ignore[no-any-return]
    stored = attention.__dict__.get("_stored_bias")
    # The stored entry refers to the table of weights and so keeps it in memory. No other table can
    # then get its address, by which the code below recognises the table.
    if (
        stored
        and stored[0].data_ptr() == table.data_ptr()
        and stored[0].dtype == table.dtype
        and stored[1] == table._version
    ):
        return stored[2]  # type: ignore[no-any-return]
    if _capturing(table.device):
        return bias()[0]  # type: ignore[no-any-return]
    computed: Tensor = _computed_for_all_streams(lambda: bias()[0], table.device)
    attention._stored_bias = (table.detach(), table._version, computed)
    return computed


@once_per_class
def _fused_layer(cls: type[nn.Module]) -> type[nn.Module]:
    plain: Any = cls

    def forward(
        self: Any,
        hidden_states: Tensor,
        input_dimensions: Size,
        always_partition: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not always_partition:
            self.set_shift_and_window_size(input_dimensions)
        orders = _window_orders(self, hidden_states, input_dimensions)
        if orders is None:
            return plain.forward(
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
            return plain.maybe_pad(self, hidden_states, height, width)  # type: ignore[no-any-return]
        return hidden_states, (0,) * 6

    def get_attn_mask(
        self: Any, height: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        def make() -> Tensor:
            return plain.get_attn_mask(self, height, width, dtype=dtype, device=device)  # type: ignore[no-any-return]

        if self.shift_size <= 0 or torch.compiler.is_compiling():
            return make()
        key = ("mask", height, width, self.window_size, self.shift_size, dtype)
        mask = _stored(key, make, device)
        return make() if mask is None else mask

    return derived(cls, "Fused", forward=forward, maybe_pad=maybe_pad, get_attn_mask=get_attn_mask)


@once_per_class
def _fused_merging(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, input_feature: Tensor, input_dimensions: Size) -> Any:
        """Merge each 2 x 2 square of patches into one row by one reordering of all patches.

        The code of transformers makes four slices instead. The gradient of each slice has the size
        of the whole input, so that code writes more memory.
        """
        height, width = input_dimensions
        if height % 2 or width % 2:
            return cls.forward(self, input_feature, input_dimensions)

        def merged(x: Tensor) -> Tensor:
            return x.view(-1, height // 2, 2, width // 2, 2, x.shape[-1]).permute(0, 1, 3, 4, 2, 5)

        orders = None
        if available(input_feature) and not torch.compiler.is_compiling():
            key = ("merged", height, width)
            orders = _order(key, height * width, merged, input_feature.device)
        x = merged(input_feature) if orders is None else reorder(input_feature, *orders)
        samples, _, channels = input_feature.shape
        return self.reduction(self.norm(x.reshape(samples, -1, 4 * channels)))

    return derived(cls, "Fused", forward=forward)


@once_per_class
def _fused_stage(cls: type[nn.Module]) -> type[nn.Module]:
    def get_reshaped_hidden_states(
        self: Any, hidden_states: Tensor, before: Tensor, height: int, width: int, is_before: bool
    ) -> Tensor:
        """Return the hidden states as images, by a reshape without a copy.

        The code of transformers makes a copy, although most callers do not use these images.
        """
        if is_before:
            x, size = before, (height, width)
        elif self.downsample is None:
            x, size = hidden_states, (height, width)
        else:
            x, size = hidden_states, ((height + 1) // 2, (width + 1) // 2)
        return x.view(len(x), *size, x.shape[2]).permute(0, 3, 1, 2)

    return derived(cls, "Fused", get_reshaped_hidden_states=get_reshaped_hidden_states)


def _window_orders(layer: Any, x: Tensor, size: Size) -> tuple[Tensor, Tensor] | None:
    """Return the permutation of patches from image order to window order, and its inverse.

    Return None if the layer's own code in transformers must run. This code also runs for images
    that need padding and when compiling, because the compiler itself fuses norm, shift and windows.
    """
    window, shift = layer.window_size, layer.shift_size
    height, width = size
    one_window = shift == 0 and height == width == window
    padded = height % window or width % window
    if torch.compiler.is_compiling() or one_window or padded or not available(x):
        return None

    def windows(raster: Tensor) -> Tensor:
        shifted = raster.view(height, width).roll((-shift, -shift), (0, 1))
        return shifted.view(height // window, window, width // window, window).transpose(1, 2)

    return _order(("windows", height, width, window, shift), height * width, windows, x.device)


def _order(
    key: tuple[Any, ...], count: int, place: Callable[[Tensor], Tensor], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    def make() -> tuple[Tensor, Tensor]:
        rows = torch.arange(count, device=device)
        order = place(rows.unsqueeze(-1)).reshape(-1)
        return order, torch.empty_like(order).scatter_(0, order, rows)

    return _stored(key, make, device)  # type: ignore[no-any-return]


# Small tensors by (key, device), which depend only on the key. They are never deleted, because
# captured CUDA graphs read the memory of these tensors.
_STORED: dict[tuple[Any, ...], Any] = {}


def _stored(key: tuple[Any, ...], make: Callable[[], Any], device: torch.device) -> Any:
    """Return the stored tensors for `key`; the first call for a device computes them by `make`.

    Return None if nothing is stored yet and a CUDA graph capture is running. Tensors that are made
    during a capture cannot be kept for use outside its graph.
    """
    if (key, device) not in _STORED:
        if _capturing(device):
            return None
        # Another thread may have stored tensors under this key in the meantime. Use those, because
        # a captured CUDA graph may already read them.
        return _STORED.setdefault((key, device), _computed_for_all_streams(make, device))
    return _STORED[key, device]


def _computed_for_all_streams(make: Callable[[], Any], device: torch.device) -> Any:
    """Return the result of `make`, usable later with gradients and on other CUDA streams.

    The call waits until the GPU has computed the result.
    """
    with torch.inference_mode(False), torch.no_grad():
        computed = make()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return computed


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_FUSED = {
    "SwinAttention": _fused_attention,
    "SwinLayer": _fused_layer,
    "SwinPatchMerging": _fused_merging,
    "SwinStage": _fused_stage,
}

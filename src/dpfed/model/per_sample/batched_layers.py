"""Batched layers: trainable layers that accept one copy of their weights per sample.

A batched layer is the original module with its class replaced in place, so names and hooks remain
and `isinstance` works as before. With its own weights `[*shape]` the layer computes as before. With
copies of the weights for M samples, `[M, *shape]`, passed by `torch.func.functional_call`, sample j
uses copy j. One backward pass then gives the gradients of the copies, which are the per-sample
gradients.

The leading axis of an activation may be any multiple of M, ordered by record. Swin needs this: it
puts the windows of all images on the leading axis.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree
from torch import Tensor, nn

from dpfed.accel.operators.patches import patch_counts, patches
from dpfed.model.per_sample.derived_class import derived, once_per_class
from dpfed.model.per_sample.keyed_dropout import KEY

# A function such as vmap: it turns a function of one record into a function of all records. The
# list has for each argument the axis of the records, or None if all records share the argument.
MapRecords = Callable[[Callable[..., Any], list[int | None]], Callable[..., Any]]


def per_sample(x: Tensor, samples: int, module: nn.Module) -> Tensor:
    """Return `x [M*k, ...]` in shape `[M, k, ...]`: k rows for each of M samples.

    M is `samples`. If the leading axis has length 1, as for position ids, all samples share `x`.

    module  the layer, for the error
    """
    if x.shape[0] == 1 and samples != 1:
        x = x.expand(samples, *x.shape[1:])
    if samples == 0 or x.shape[0] % samples:
        raise ValueError(
            f"{type(module).__name__} got a leading axis of {x.shape[0]} for {samples} records, "
            "which is no multiple"
        )
    return x.reshape(samples, x.shape[0] // samples, *x.shape[1:])


class BatchedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(x)
        samples = self.weight.shape[0]
        rows = per_sample(x, samples, self).flatten(1, -2) if x.dim() > 1 else x
        weight = self.weight.transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(rows, weight)
        else:
            y = torch.baddbmm(self.bias.unsqueeze(1), rows, weight)
        first = samples if x.shape[0] == 1 else x.shape[0]
        return y.reshape(first, *x.shape[1:-1], y.shape[-1])


class BatchedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        extra = len(self.normalized_shape) + 1
        if weight is None or weight.dim() < extra:
            return super().forward(x)
        y = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        lead = y.shape
        y = per_sample(y, weight.shape[0], self)
        broadcast_shape = (weight.shape[0], *([1] * (y.dim() - extra)), *self.normalized_shape)
        y = y * weight.view(broadcast_shape)
        if bias is not None:
            y = y + bias.view(broadcast_shape)
        return y.reshape(y.shape[0] * y.shape[1], *lead[1:])


class BatchedGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is None or weight.dim() == 1:
            return super().forward(x)
        y = F.group_norm(x, self.num_groups, None, None, self.eps)
        y = per_sample(y, weight.shape[0], self)
        broadcast_shape = (weight.shape[0], 1, self.num_channels, *([1] * (x.dim() - 2)))
        y = y * weight.view(broadcast_shape) + self.bias.view(broadcast_shape)
        return y.flatten(0, 1)


class BatchedEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(ids)
        samples, rows, width = self.weight.shape
        first = samples if ids.shape[0] == 1 else ids.shape[0]
        grouped = per_sample(ids, samples, self).flatten(1)
        table = self.weight.reshape(samples * rows, width)
        offset = torch.arange(samples, device=ids.device).unsqueeze(1) * rows
        # The embedding tables of all records form one long table. A wrong id could read another
        # record's copy, so replace it by an id beyond the table, for which PyTorch raises an error.
        known = (grouped >= 0) & (grouped < rows)
        y = F.embedding(torch.where(known, grouped + offset, samples * rows), table)
        if self.padding_idx is not None:
            # The row of the padding token gets no gradient, as in nn.Embedding.
            y = torch.where((grouped == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return y.view(first, *ids.shape[1:], width)


class BatchedConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 4:
            return super().forward(x)
        samples = self.weight.shape[0]
        grouped = per_sample(x, samples, self)  # [M, k, c, h, w]
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            pad = self._reversed_padding_repeated_twice
            padded = F.pad(grouped.flatten(0, 1), pad, self.padding_mode)
            grouped = padded.view(*grouped.shape[:2], *padded.shape[1:])
            padding = 0
        if self._as_product(grouped):
            return self._product(grouped.flatten(0, 1))
        # Use float32 in half precision on a CPU: PyTorch's kernel there spreads a NaN from the
        # channel groups of one record to those of the next record.
        dtype = torch.float32 if _half_on_cpu(x) else x.dtype
        inner = grouped.transpose(0, 1).flatten(1, 2).to(dtype)  # [k, M*c, h, w]
        weight = self.weight.flatten(0, 1).to(dtype)
        bias = None if self.bias is None else self.bias.reshape(-1).to(dtype)
        groups = samples * self.groups
        y = F.conv2d(inner, weight, bias, self.stride, padding, self.dilation, groups)
        y = y.view(y.shape[0], samples, self.out_channels, *y.shape[2:]).transpose(0, 1)
        return y.flatten(0, 1).to(x.dtype)

    def _as_product(self, grouped: Tensor) -> bool:
        return (
            self.groups == 1
            and grouped.shape[1] == 1
            and max(self.dilation) == 1
            and self.padding_mode == "zeros"
            and not isinstance(self.padding, str)
            and self._product_is_faster(grouped)
        )

    def _product_is_faster(self, x: Tensor) -> bool:
        """Return True if a matrix product with patches is faster than a convolution with groups.

        Both compute one convolution per record. The product is always faster on a GPU, which has no
        fast convolution for many groups. On a CPU the convolution is faster for many patches or few
        channels (measured on one and two threads).
        """
        if x.device.type != "cpu" or _half_on_cpu(x) or self.kernel_size == (1, 1):
            return True
        places = prod(patch_counts(x.shape, *self._sizes))
        return max(places, 100) < min(self.in_channels, self.out_channels)

    @property
    def _sizes(self) -> Any:
        return self.kernel_size, self.stride, self.padding

    def _product(self, x: Tensor) -> Tensor:
        """Return the output images of the convolution, computed by one matrix product per record.

        For M records, the product multiplies the weights `[M, o, c*h*w]` by the patches of the
        images `x`, `[M, c*h*w, places]`. A patch has h x w pixels of c channels; `places` is the
        number of patches.
        """
        columns, weight = patches(x, *self._sizes), self.weight.flatten(2)
        if self.bias is None:
            y = torch.bmm(weight, columns)
        else:
            y = torch.baddbmm(self.bias.unsqueeze(2), weight, columns)
        return y.view(*y.shape[:2], *patch_counts(x.shape, *self._sizes))


def _half_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


# Plain class -> batched class, which accepts one copy of its weights per record. Subclasses of a
# plain class may have another forward pass; they use `vmap_layer`.
BATCHED_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: BatchedLinear,
    nn.LayerNorm: BatchedLayerNorm,
    nn.GroupNorm: BatchedGroupNorm,
    nn.Embedding: BatchedEmbedding,
    nn.Conv2d: BatchedConv2d,
}


@once_per_class
def vmap_layer(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of any module class that accepts one copy of its weights per record.

    It computes all records by one `vmap`.
    """
    return _mapped_layer(cls, lambda one, axes: torch.vmap(one, (0, *axes), randomness="different"))


@once_per_class
def loop_layer(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of any module class that accepts one copy of its weights per record.

    It computes one record after another.
    """
    return _mapped_layer(cls, _by_loop)


def _by_loop(one: Callable[..., Any], axes: list[int | None]) -> Callable[..., Any]:
    def run(weights: dict[str, Tensor], *leaves: Any) -> list[Tensor]:
        rows = []
        for j in range(len(next(iter(weights.values())))):
            own = {name: w[j] for name, w in weights.items()}
            own_leaves = (x[j] if axis == 0 else x for x, axis in zip(leaves, axes, strict=True))
            rows.append(one(own, *own_leaves))
        return [torch.stack(of_one) for of_one in zip(*rows, strict=True)]

    return run


def _mapped_layer(cls: type[nn.Module], map_records: MapRecords) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain_dims: dict[str, int] = self._plain_dims  # type: ignore[assignment]
        batched: dict[str, Tensor] = {
            n: p for n, p in self.named_parameters() if p.dim() > plain_dims[n]
        }
        if not batched:
            return cls.forward(self, *args, **kwargs)
        samples = next(iter(batched.values())).shape[0]
        flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        axes = _record_axes(self, flat, samples)
        leaves = [
            per_sample(leaf, samples, self) if axis == 0 else leaf
            for leaf, axis in zip(flat, axes, strict=True)
        ]
        # Each record also needs its own dropout key, for dropout layers inside this module.
        for name, buffer in self.named_buffers():
            if name.rpartition(".")[2] == KEY and buffer.numel():
                batched[name] = buffer.unsqueeze(1)
        form: list[Any] = []

        def single(weights: dict[str, Tensor], *leaves: Any) -> Any:
            one_args, one_kwargs = torch.utils._pytree.tree_unflatten(list(leaves), spec)
            out = torch.func.functional_call(self, weights, one_args, one_kwargs)
            form[:] = torch.utils._pytree.tree_flatten(out)
            # `vmap` can return only tensors. Keep all other outputs in `form`.
            return [y for y in form[0] if isinstance(y, Tensor)]

        tensors = iter(map_records(single, axes)(batched, *leaves))
        out = [next(tensors).flatten(0, 1) if isinstance(y, Tensor) else y for y in form[0]]
        return torch.utils._pytree.tree_unflatten(out, form[1])

    return derived(cls, "Mapped", forward=forward)


def _record_axes(module: nn.Module, leaves: list[Any], samples: int) -> list[int | None]:
    """Return 0 for each argument whose first axis holds records, None for each that all share.

    The first call guesses from the shapes, and later calls return the same result. The first call
    comes from the isolation check, which detects wrong gradients and so a wrong guess. In a later
    call a wrong guess would remain unnoticed: a shared argument may have a fitting length by
    chance.
    """
    known: dict[int, list[int | None]] = module.__dict__.setdefault("_axes", {})
    axes = known.get(len(leaves))
    if axes is None:
        axes = [0 if _is_batched(leaf, samples) else None for leaf in leaves]
        # With a single record, every argument seems to hold records. Do not store this result,
        # because it would be wrong for several records.
        if samples > 1:
            known[len(leaves)] = axes
    return axes


def _is_batched(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] % samples == 0


def install_swin_bias(module: nn.Module, parent: nn.Module | None) -> bool:
    """Let Swin's position bias accept one copy of its weights per record. Return True if done.

    The class of its parent, the attention layer, is replaced too: the bias has no input, so the
    parent tells it how many windows each record has. Return False for any other module, which does
    not change.
    """
    if type(module).__name__ != "SwinRelativePositionBias" or parent is None:
        return False
    module.__class__ = _batched_swin_bias(type(module))
    module._windows = 1  # type: ignore[assignment]
    parent.__class__ = _batched_swin_attention(type(parent))
    return True


@once_per_class
def _batched_swin_bias(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any) -> Tensor:
        table = self.relative_position_bias_table
        if table.dim() == 2:
            return cls.forward(self)  # type: ignore[no-any-return]
        sides = (self.window_area, self.window_area)
        bias = table[:, self.relative_position_index].unflatten(1, sides)
        return bias.permute(0, 3, 1, 2).repeat_interleave(self._windows, 0)  # type: ignore[no-any-return]

    return derived(cls, "Batched", forward=forward)


@once_per_class
def _batched_swin_attention(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        table = self.relative_position_bias.relative_position_bias_table
        if table.dim() == 3:
            self.relative_position_bias._windows = hidden_states.shape[0] // table.shape[0]
        return cls.forward(self, hidden_states, *args, **kwargs)

    return derived(cls, "Batched", forward=forward)

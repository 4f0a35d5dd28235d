"""Batched twins: trainable leaves that accept one copy of their weights per sample.

A twin is the original module with its class exchanged in place (names, hooks and `isinstance` stay), so a model with
twins is still the same model. Called with its own weights it does what it always did. Called through
`torch.func.functional_call` with weights that carry one more leading axis, `[M, *shape]`, it gives sample j the copy j;
one ordinary backward pass then leaves the per-sample gradients in the gradients of the copies.

The leading axis of an activation may be any multiple of M, batch-major (Swin folds its windows into it).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree
from torch import Tensor, nn

from dpfed.accel import places
from dpfed.model.fast_paths.patches import patches
from dpfed.model.per_sample.keyed_dropout import KEY, once

Mapping = Callable[[Callable[..., Any], list[int | None]], Callable[..., Any]]
"""(function of one record, axis of each argument or None) -> function of all records."""


def per_sample(x: Tensor, samples: int, module: nn.Module) -> Tensor:
    """`[M*k, ...]` -> `[M, k, ...]`; a leading axis of 1 is shared by all samples (BERT's position ids)."""
    if x.shape[0] == 1 and samples != 1:
        x = x.expand(samples, *x.shape[1:])
    if samples == 0 or x.shape[0] % samples:
        raise ValueError(
            f"{type(module).__name__} got a leading axis of {x.shape[0]} for {samples} records, which is no multiple"
        )
    return x.reshape(samples, x.shape[0] // samples, *x.shape[1:])


class BatchedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(x)
        rows = per_sample(x, self.weight.shape[0], self).flatten(1, -2) if x.dim() > 1 else x
        weight = self.weight.transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(rows, weight)
        else:
            y = torch.baddbmm(self.bias.unsqueeze(1), rows, weight)
        return y.reshape(*_lead(x, self.weight.shape[0]), y.shape[-1])


def _lead(x: Tensor, samples: int) -> tuple[int, ...]:
    first = samples if x.shape[0] == 1 else x.shape[0]
    return (first, *x.shape[1:-1])


class TwinLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        extra = len(self.normalized_shape) + 1
        if weight is None or weight.dim() < extra:
            return super().forward(x)
        y = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        lead = y.shape
        y = per_sample(y, weight.shape[0], self)
        spread = (weight.shape[0], *([1] * (y.dim() - extra)), *self.normalized_shape)
        y = y * weight.view(spread)
        if bias is not None:
            y = y + bias.view(spread)
        return y.reshape(y.shape[0] * y.shape[1], *lead[1:])


class TwinGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is None or weight.dim() == 1:
            return super().forward(x)
        y = per_sample(
            F.group_norm(x, self.num_groups, None, None, self.eps), weight.shape[0], self
        )
        spread = (weight.shape[0], 1, self.num_channels, *([1] * (x.dim() - 2)))
        y = y * weight.view(spread) + self.bias.view(spread)
        return y.flatten(0, 1)


class TwinEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(ids)
        samples, rows, width = self.weight.shape
        shape = (samples if ids.shape[0] == 1 else ids.shape[0], *ids.shape[1:])
        per = per_sample(ids, samples, self).flatten(1)
        table = self.weight.reshape(samples * rows, width)
        offset = torch.arange(samples, device=ids.device).unsqueeze(1) * rows
        # an id beyond the table would read the next record's copy: sent beyond all copies it is an error, as it should be
        known = (per >= 0) & (per < rows)
        y = F.embedding(torch.where(known, per + offset, samples * rows), table)
        if self.padding_idx is not None:  # as nn.Embedding: the padding row gets no gradient
            y = torch.where((per == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return y.view(*shape, width)


class TwinConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 4:
            return super().forward(x)
        samples = self.weight.shape[0]
        per = per_sample(x, samples, self)
        if self.padding_mode != "zeros":
            per = F.pad(
                per.flatten(0, 1), self._reversed_padding_repeated_twice, self.padding_mode
            ).view(
                *per.shape[:2], per.shape[2], *_padded(per, self._reversed_padding_repeated_twice)
            )
        padding: Any = self.padding if self.padding_mode == "zeros" else 0
        if self._as_product(per):
            return self._product(per.flatten(0, 1))
        # In half precision a CPU's kernel for groups lets what is not finite in one of them reach its neighbour.
        dtype = torch.float32 if _short_on_cpu(x) else x.dtype
        inner = per.transpose(0, 1).flatten(1, 2).to(dtype)  # [k, M*c, h, w]: one group per sample
        weight = self.weight.flatten(0, 1).to(dtype)
        bias = None if self.bias is None else self.bias.reshape(-1).to(dtype)
        y = F.conv2d(
            inner, weight, bias, self.stride, padding, self.dilation, samples * self.groups
        )
        y = y.view(y.shape[0], samples, self.out_channels, *y.shape[2:]).transpose(0, 1)
        return y.flatten(0, 1).to(x.dtype)

    def _as_product(self, per: Tensor) -> bool:
        """Whether the convolution is plain enough for a product for each sample, and quicker as one."""
        plain = self.groups == 1 and per.shape[1] == 1 and max(self.dilation) == 1
        return (
            plain
            and self.padding_mode == "zeros"
            and not isinstance(self.padding, str)
            and self._pays(per)
        )

    def _pays(self, x: Tensor) -> bool:
        """A convolution with a group for each sample finds no good kernel on a GPU, and matrix units want products. A CPU's is
        good where there are many places or few weights (measured on one and two threads)."""
        if x.device.type != "cpu" or _short_on_cpu(x) or self.kernel_size == (1, 1):
            return True
        return max(prod(places(x.shape, *self._sizes)), 100) < min(
            self.in_channels, self.out_channels
        )

    @property
    def _sizes(self) -> Any:
        return self.kernel_size, self.stride, self.padding

    def _product(self, x: Tensor) -> Tensor:
        """Weights `[M, o, c*h*w]` times the patches that they see, as columns `[M, c*h*w, places]`."""
        columns, weight = patches(x, *self._sizes), self.weight.flatten(2)
        y = (
            torch.bmm(weight, columns)
            if self.bias is None
            else torch.baddbmm(self.bias.unsqueeze(2), weight, columns)
        )
        return y.view(*y.shape[:2], *places(x.shape, *self._sizes))


def _short_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def _padded(per: Tensor, pad: list[int]) -> tuple[int, int]:
    return per.shape[-2] + pad[2] + pad[3], per.shape[-1] + pad[0] + pad[1]


TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: BatchedLinear,
    nn.LayerNorm: TwinLayerNorm,
    nn.GroupNorm: TwinGroupNorm,
    nn.Embedding: TwinEmbedding,
    nn.Conv2d: TwinConv2d,
}
"""Exact types only: a subclass may do something else in its forward, and then goes the general way."""


@once
def vmap_layer(cls: type[nn.Module]) -> type[nn.Module]:
    """The general way: any module, by `vmap` of its own forward over samples and weight copies."""
    return _mapped_twin(cls, lambda one, axes: torch.vmap(one, (0, *axes), randomness="different"))


@once
def loop_layer(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the slow way: one call of the module for each record, with that record's weights."""
    return _mapped_twin(cls, _by_loop)


def _by_loop(one: Callable[..., Any], axes: list[int | None]) -> Callable[..., Any]:
    """Return `one` called record by record, with the results stacked as `vmap` stacks them."""

    def run(weights: dict[str, Tensor], *leaves: Any) -> list[Tensor]:
        rows = []
        for j in range(len(next(iter(weights.values())))):
            own = {name: w[j] for name, w in weights.items()}
            mine = (x[j] if axis == 0 else x for x, axis in zip(leaves, axes, strict=True))
            rows.append(one(own, *mine))
        return [torch.stack(of_one) for of_one in zip(*rows, strict=True)]

    return run


def _mapped_twin(cls: type[nn.Module], mapped: Mapping) -> type[nn.Module]:
    """Return a class whose forward is `mapped` over samples and weight copies."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain_dims: dict[str, int] = self._plain_dims  # type: ignore[assignment]
        batched: dict[str, Tensor] = {
            n: p for n, p in self.named_parameters() if p.dim() > plain_dims[n]
        }
        if not batched:
            return cls.forward(self, *args, **kwargs)
        samples = next(iter(batched.values())).shape[0]
        flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        # Which arguments carry records is settled by the first call, that of the liveness check: there a wrong guess is
        # found, while a shared argument could look batched at some later number of records.
        known: dict[int, list[int | None]] = self.__dict__.setdefault("_axes", {})
        axes = known.get(len(flat)) or [0 if _is_batched(leaf, samples) else None for leaf in flat]
        if (
            samples > 1
        ):  # with a single record everything looks batched, and either reading is right
            known[len(flat)] = axes
        split = [
            per_sample(leaf, samples, self) if axis == 0 else leaf
            for leaf, axis in zip(flat, axes, strict=True)
        ]

        # a dropout inside drops by its own record's key
        keys = {n: b for n, b in self.named_buffers() if n.rpartition(".")[2] == KEY and b.numel()}
        batched |= {n: key.unsqueeze(1) for n, key in keys.items()}
        form: list[Any] = []

        def single(weights: dict[str, Tensor], *leaves: Any) -> Any:
            one_args, one_kwargs = torch.utils._pytree.tree_unflatten(list(leaves), spec)
            form[:] = torch.utils._pytree.tree_flatten(
                torch.func.functional_call(self, weights, one_args, one_kwargs)
            )
            return [y for y in form[0] if isinstance(y, Tensor)]  # vmap returns nothing but tensors

        tensors = iter(mapped(single, axes)(batched, *split))
        out = [next(tensors).flatten(0, 1) if isinstance(y, Tensor) else y for y in form[0]]
        return torch.utils._pytree.tree_unflatten(out, form[1])

    return type(f"Mapped{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__})


def _is_batched(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] % samples == 0


def install_batched_layer(module: nn.Module, twin: type[nn.Module]) -> None:
    """Exchanges the class in place; the module keeps its name, its parameters and its hooks."""
    module.__class__ = twin


def special_batched_layer(module: nn.Module, parent: nn.Module | None) -> bool:
    """Modules whose parameter is used by the module above them. Swin's position bias takes no input: the number of
    windows that each record was folded into is known only to the attention that asks for it."""
    if type(module).__name__ != "SwinRelativePositionBias" or parent is None:
        return False
    install_batched_layer(module, _swin_bias_twin(type(module)))
    module._windows = 1  # type: ignore[assignment]
    install_batched_layer(parent, _swin_attention_twin(type(parent)))
    return True


@once
def _swin_bias_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any) -> Tensor:
        table = self.relative_position_bias_table
        if table.dim() == 2:
            return cls.forward(self)  # type: ignore[no-any-return]
        bias = table[:, self.relative_position_index].unflatten(
            1, (self.window_area, self.window_area)
        )
        return bias.permute(0, 3, 1, 2).repeat_interleave(self._windows, 0)  # type: ignore[no-any-return]

    return type(f"Twin{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__})


@once
def _swin_attention_twin(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        table = self.relative_position_bias.relative_position_bias_table
        if table.dim() == 3:
            self.relative_position_bias._windows = hidden_states.shape[0] // table.shape[0]
        return cls.forward(self, hidden_states, *args, **kwargs)

    return type(f"Twin{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__})

"""Per-sample gradients of a whole model in one forward and one backward, for S clients side by side (DESIGN 5).

Every record gets its own copy of the trainable weights, gathered from its client's row of theta `[S, P]`; the twins
(`twins.py`) use the copies, and the gradients with respect to the copies are the per-sample gradients.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpfed.errors import DpfedError
from dpfed.model.fast_paths.bert import fuse_bert
from dpfed.model.fast_paths.layer_norm import fuse_norms
from dpfed.model.fast_paths.lora_product import fuse_lora
from dpfed.model.fast_paths.swin import fuse_windows
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.batched_layers import (
    TWINS,
    BatchedLinear,
    install_batched_layer,
    special_batched_layer,
    vmap_layer,
)
from dpfed.model.per_sample.compiled import Compiled
from dpfed.model.per_sample.keyed_dropout import install_keyed_dropout
from dpfed.model.per_sample.row_layout import Layout
from dpfed.model.per_sample.whole_modules import map_whole_modules
from dpfed.model.task import right_class

Batch = Mapping[str, Tensor]
Forward = Callable[[nn.Module, dict[str, Tensor], Batch], Tensor]
"""(model, weights, inputs) -> scores; how a record's inputs enter the model."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""(scores, labels) -> one loss per record, never a mean over records (SPEC 1.4a)."""


class PerSample:
    """A model made ready for per-sample gradients. It holds no private data and no random state."""

    def __init__(
        self,
        model: nn.Module,
        space: Space,
        forward: Forward,
        loss: Loss,
        correct: Loss = right_class,
        rows: int = 1024,
    ) -> None:
        refuse_batch_norm(model)
        install_twins(model, space)
        fuse_lora(model)
        fuse_norms(model)
        fuse_windows(model)
        fuse_bert(model)
        self._keys = install_keyed_dropout(model)
        self._slices = space.slices()
        self.model = model.eval().requires_grad_(False)
        self.space = space
        self.forward = forward
        self.loss = loss
        self.correct = correct
        self.rows = rows
        self._many = 16.0
        self._alone = (
            threading.Lock()
        )  # weights are exchanged inside the modules: one thread at a time
        self.dtype = torch.float32
        self._turned = _turned(model, space)
        self._copied, self._raw = Layout(space, self._turned, step=64), Layout(space, self._turned)
        self._losses: Callable[..., Tensor] = self._sum_of_losses

    def to(self, dtype: torch.dtype) -> None:
        """Frozen weights and activations in another precision. Gradients come back in it; what is done with them is not."""
        self.dtype = dtype
        self.model.to(dtype)

    def compile(self, **options: Any) -> None:
        """The forward passes and, with them, the backward passes."""
        self._losses = Compiled(self._sum_of_losses, self.model, **options)

    def through(self, forward: Forward, module: str) -> PerSample:
        """The same weights and vector by another way through the model, which leads through the dropout of `module` alone."""
        other = copy.copy(self)
        other.forward, other._losses = forward, other._sum_of_losses
        other._keys = [key for key in self._keys if key.startswith(f"{module}.")]
        return other

    def _sum_of_losses(
        self, copies: list[Tensor], keys: Tensor | None, inputs: dict[str, Tensor], labels: Tensor
    ) -> Tensor:
        weights = dict(zip(self.space.names, copies, strict=True))
        if keys is not None:
            weights.update(dict.fromkeys(self._keys, keys))
        losses = self.loss(self.forward(self.model, weights, inputs), labels)
        if losses.shape != labels.shape[:1]:
            raise ValueError(
                f"the loss has shape {tuple(losses.shape)} for {len(labels)} records: one each is needed"
            )
        return losses.sum()

    @property
    def classifies(self) -> bool:
        """Whether scores are those of classes; a language model's are the losses of its tokens."""
        return self.correct is right_class

    @property
    def has_dropout(self) -> bool:
        return bool(self._keys)

    @property
    def dropout(self) -> tuple[str, ...]:
        """The layers that draw by a record's key."""
        return tuple(key.rpartition(".")[0] for key in self._keys)

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Batch,
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        """Per-sample gradients `[M, n]`, one for each trainable tensor in the order of the space.

        theta `[S, P]`, client `[M]` the row of theta that each record trains, keys `[M]` for dropout.
        """
        if len(client) == 0:
            return [theta.new_zeros(0, shape.numel()) for shape in self.space.shapes]
        grads = self.raw_grads(theta, client, inputs, labels, keys)
        return [
            grad.view(len(client), shape[1], shape[0]).transpose(1, 2).reshape(len(client), -1)
            if turned
            else grad
            for grad, shape, turned in zip(grads, self.space.shapes, self._turned, strict=True)
        ]

    def raw_grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Batch,
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        """`grads` as the backward pass leaves them, without a copy; `ordered` is for what is made of them."""
        copies = self._copies(theta, client)
        with torch.enable_grad():
            weights = [
                c.transpose(1, 2) if turned else c
                for c, turned in zip(copies, self._turned, strict=True)
            ]
            with self._alone:
                total = self._losses(weights, keys, dict(inputs), labels)
            grads = torch.autograd.grad(total, copies, allow_unused=True)
        return [
            (torch.zeros_like(copy) if grad is None else grad).reshape(len(client), -1)
            for copy, grad in zip(copies, grads, strict=True)
        ]

    def ordered(self, raw: Tensor) -> Tensor:
        """`[S, P]` with coordinates as those of `raw_grads`, in the order of the space; the same tensor if it is that already."""
        return self._raw.vectors(raw)

    def scores(self, vector: Tensor, inputs: Batch) -> Tensor:
        """The model's output for the trainable vector `[P]`, without dropout. A GPU takes more records at once, and half
        as many for as long as they do not fit."""
        weights = {name: w.to(self.dtype) for name, w in self.space.unflatten(vector).items()}
        if vector.device.type != "cuda":
            return self._scores(weights, inputs, self.rows)
        while True:
            try:
                return self._scores(weights, inputs, self._many * self.rows)
            except torch.OutOfMemoryError:
                if self._many * self.rows <= 1:
                    raise
            self._many /= 2  # outside the handler, where the failed pass is no longer held
            torch.cuda.empty_cache()

    def records_at_once(self, device: torch.device) -> int:
        """Return how many records one pass of `scores` takes on this kind of device."""
        return 16 * self.rows if device.type == "cuda" else self.rows

    def _scores(self, weights: dict[str, Tensor], inputs: Batch, rows: float) -> Tensor:
        count, step = len(next(iter(inputs.values()))), max(1, int(rows))
        with torch.no_grad(), self._alone:
            parts = [
                self.forward(
                    self.model, dict(weights), {name: x[i : i + step] for name, x in inputs.items()}
                )
                for i in range(0, max(count, 1), step)
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _copies(self, theta: Tensor, client: Tensor) -> list[Tensor]:
        """Each record's own copy of every trainable tensor, gathered in one go into rows whose pieces are aligned for matrix
        units."""
        rows = self._copied.rows(theta, self.dtype)
        spread = (
            rows.expand(len(client), -1) if theta.shape[0] == 1 else rows.index_select(0, client)
        )
        return [
            spread[:, at : at + shape.numel()]
            .view(len(client), *(reversed(shape) if turned else shape))
            .detach()
            .requires_grad_(True)
            for at, shape, turned in zip(
                self._copied.starts, self.space.shapes, self._turned, strict=False
            )
        ]


def _turned(model: nn.Module, space: Space) -> list[bool]:
    """Whether copies of a tensor are held as its transpose. A linear layer multiplies by the transpose of its weight, and so
    its gradient comes out transposed: held this way it needs no copy."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        type(modules.get(name.rpartition(".")[0])) is BatchedLinear and len(shape) == 2
        for name, shape in zip(space.names, space.shapes, strict=True)
    ]


def call(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
    """The usual forward: inputs as keyword arguments, `.logits` where the model returns a structure."""
    out = torch.func.functional_call(model, weights, (), dict(inputs))
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor):
        raise DpfedError(
            f"{type(model).__name__} returns {type(out).__name__} without logits, so it has no loss here"
        )
    return logits


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point inputs in the model's type; a mask's least number stays finite."""
    if dtype == torch.float32:
        return inputs
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    out = dict(inputs)
    for name, x in inputs.items():
        if x.is_floating_point():
            out[name] = x.clamp_min(least).to(dtype)
    return out


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The named tensors that will be one flat vector: every parameter that asks for a gradient."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise DpfedError("the model has no trainable tensor: set model.train to lora, full or head")
    return found


def refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        learns = any(p.requires_grad for p in module.parameters())
        if (
            module.training or learns or module.running_mean is None
        ):  # without running statistics it mixes in eval too
            raise DpfedError(
                f"{name} is a {type(module).__name__} that mixes the records of a batch, so no record's gradient is its "
                "own: replace it by GroupNorm, or keep it frozen in eval mode (model.eval() and train = lora or head)"
            )


def install_twins(model: nn.Module, space: Space) -> None:
    """Finds every module that uses a trainable tensor (a tied one has several) and exchanges it for its twin."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {id(parameters[name]) for name in space.names}
    map_whole_modules(model, trained)
    for tensor, parameter in parameters.items():
        if id(parameter) not in trained:
            continue
        owner = tensor.rpartition(".")[0]
        while isinstance(
            modules[owner], nn.ParameterDict | nn.ParameterList | nn.ModuleDict | nn.ModuleList
        ):
            owner = owner.rpartition(".")[
                0
            ]  # containers have no forward: the module above reads the tensor
        module = modules[owner]
        if isinstance(module, nn.Embedding) and (
            module.max_norm is not None or module.scale_grad_by_freq
        ):
            raise DpfedError(
                f"{owner} is an Embedding with max_norm or scale_grad_by_freq, which mix records: switch them off"
            )
        if (
            hasattr(module, "_plain_dims")
            or hasattr(module, "_windows")
            or type(module) in TWINS.values()
        ):
            continue
        if type(module) in TWINS and all(id(p) in trained for p in module.parameters()):
            install_batched_layer(module, TWINS[type(module)])
        elif not special_batched_layer(module, modules.get(owner.rpartition(".")[0])):
            module._plain_dims = {n: p.dim() for n, p in module.named_parameters()}
            install_batched_layer(module, vmap_layer(type(module)))

"""Per-sample gradients of a model in one forward and one backward pass, for S clients side by side.

Every record gets its own copy of the trainable weights. Theta `[S, P]` has one row of P trainable
numbers for each client, and a record copies its client's row. Batched layers compute with these
copies. The gradient of a record's copy is then the record's per-sample gradient.
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
from dpfed.model.fast_paths.checkpointing import checkpoint_layers
from dpfed.model.fast_paths.layer_norm import fuse_norms
from dpfed.model.fast_paths.lora import fuse_lora
from dpfed.model.fast_paths.swin import fuse_windows
from dpfed.model.frozen.quantised import set_dtype
from dpfed.model.generation import Generation
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.batched_layers import (
    BATCHED_LAYERS,
    BatchedLinear,
    install_swin_bias,
    vmap_layer,
)
from dpfed.model.per_sample.compiled import Compiled
from dpfed.model.per_sample.keyed_dropout import install_keyed_dropout
from dpfed.model.per_sample.row_layout import Layout
from dpfed.model.per_sample.whole_modules import map_whole_modules
from dpfed.model.task import Task

Batch = Mapping[str, Tensor]
# A function (model, weights by name, inputs) -> scores, which calls the model.
Forward = Callable[[nn.Module, dict[str, Tensor], Batch], Tensor]
CONTAINERS = nn.ParameterDict | nn.ParameterList | nn.ModuleDict | nn.ModuleList


class PerSample:
    """A model that computes per-sample gradients; it stores no private data and no random state.

    model    the plain model; the classes of its layers are replaced
    space    the layout of its trainable tensors in the flat vector
    forward  calls the model and returns scores, one row per record
    task     turns scores and labels into one loss per record, and into predictions
    rows     number of records in one pass of `scores` on a CPU

    Attributes for exact isolation, in which no record changes another record's gradient. A place
    is the position of a record in a pass. `places.settle_places` sets all but the first:
    shares_passes  False if records of one pass change the rounding of each other, as in a mixture
                   of experts
    places         number of places in one pass
    alone          the reason if a pass must have only one record, else None
    """

    def __init__(
        self,
        model: nn.Module,
        space: Space,
        forward: Forward,
        task: Task,
        rows: int = 1024,
    ) -> None:
        refuse_batch_norm(model)
        install_batched_layers(model, space)
        fuse_lora(model)
        fuse_norms(model)
        fuse_windows(model)
        fuse_bert(model)
        self._keys = install_keyed_dropout(model)
        self.model = model.eval().requires_grad_(False)
        self.space = space
        self.forward = forward
        self.task = task
        self.rows = rows
        self.shares_passes = not has_experts(model)
        self.places = 1
        self.alone: str | None = None
        self._rows_factor = 16.0
        # Each call replaces weights inside the modules, so one thread at a time may run the model.
        self._lock = threading.Lock()
        self.dtype = torch.float32
        self._checkpoints = False
        self._transposed = _transposed(model, space)
        # Each tensor's copy starts at a multiple of 64 numbers, as matrix units of GPUs require.
        self._copy_layout = Layout(space, self._transposed, step=64)
        self._gradient_layout = Layout(space, self._transposed)
        self._losses: Callable[..., Tensor] = self._sum_of_losses

    def to(self, dtype: torch.dtype) -> None:
        """Set the dtype of activations, per-sample gradients and frozen weights.

        Quantised weights stay as they are.
        """
        self.dtype = dtype
        set_dtype(self.model, dtype)

    def checkpoint(self) -> None:
        """Store only the inputs of repeated layers for the backward pass, to save memory."""
        checkpoint_layers(self.model)
        self._checkpoints = True

    def compile(self, **options: Any) -> None:
        """Compile the forward and backward passes that compute gradients."""
        self._losses = Compiled(self._sum_of_losses, self.model, self._checkpoints, **options)

    def through(self, forward: Forward, module: str) -> PerSample:
        """Return a PerSample with the same modules that calls `forward` instead of `self.forward`.

        `forward` may use dropout only in the module called `module`.
        """
        other = copy.copy(self)
        other.forward = forward
        other._losses = other._sum_of_losses
        other._keys = [key for key in self._keys if key.startswith(f"{module}.")]
        return other

    def _sum_of_losses(
        self, copies: list[Tensor], keys: Tensor | None, inputs: dict[str, Tensor], labels: Tensor
    ) -> Tensor:
        weights = dict(zip(self.space.names, copies, strict=True))
        if keys is not None:
            weights.update(dict.fromkeys(self._keys, keys))
        losses = self.task.loss(self.forward(self.model, weights, inputs), labels)
        if losses.shape != labels.shape[:1]:
            raise ValueError(
                f"the loss has shape {tuple(losses.shape)} for {len(labels)} records: "
                "one each is needed"
            )
        return losses.sum()

    @property
    def has_dropout(self) -> bool:
        return bool(self._keys)

    @property
    def dropout(self) -> tuple[str, ...]:
        """The names of the dropout layers; the key (seed) of a record decides its dropout masks."""
        return tuple(key.rpartition(".")[0] for key in self._keys)

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Batch,
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the per-sample gradients of M records: `[M, n]` for each trainable tensor.

        n is the number of elements of the tensor.

        theta   the trainable vectors of S clients, `[S, P]`
        client  for each record, the row of theta that it uses, `[M]`
        keys    seeds of the records' dropout masks, `[M]`; None switches dropout off
        """
        if len(client) == 0:
            return [theta.new_zeros(0, shape.numel()) for shape in self.space.shapes]
        grads = self.raw_grads(theta, client, inputs, labels, keys)
        for i, shape in enumerate(self.space.shapes):
            if self._transposed[i]:
                rows = grads[i].view(len(client), shape[1], shape[0])
                grads[i] = rows.transpose(1, 2).reshape(len(client), -1)
        return grads

    def raw_grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Batch,
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of `grads`, but with the gradients of linear weights transposed.

        This saves a copy. After the gradients are summed, `ordered` transposes them back.
        """
        copies = self._copies(theta, client)
        with torch.enable_grad():
            weights = [
                c.transpose(1, 2) if transposed else c
                for c, transposed in zip(copies, self._transposed, strict=True)
            ]
            # The backward pass may call parts of the model again, so it needs the lock too.
            with self._lock:
                total = self._losses(weights, keys, dict(inputs), labels)
                grads = torch.autograd.grad(total, copies, materialize_grads=True)
        return [grad.reshape(len(client), -1) for grad in grads]

    def ordered(self, raw: Tensor) -> Tensor:
        """Return sums of gradients from `raw_grads`, in the order of the flat trainable vector.

        raw  `[S, P]` one sum of P numbers for each of S clients; returned as it is if its order is
             already right
        """
        return self._gradient_layout.vectors(raw)

    def scores(self, vector: Tensor, inputs: Batch) -> Tensor:
        """Return the model's scores of all records for the trainable vector `[P]`, without dropout.

        The records are computed in several forward passes, with more records per pass on a GPU than
        on a CPU. After an out-of-memory error on a GPU, passes of half the size compute all again.
        """
        weights = {name: w.to(self.dtype) for name, w in self.space.unflatten(vector).items()}
        if vector.device.type != "cuda":
            return self._scores(weights, inputs, self.rows)
        while True:
            try:
                return self._scores(weights, inputs, self._rows_factor * self.rows)
            except torch.OutOfMemoryError:
                if self._rows_factor * self.rows <= 1:
                    raise
            # Retry outside the `except` block: inside it the error keeps the failed pass in memory.
            self._rows_factor /= 2
            torch.cuda.empty_cache()

    def generate(self, vector: Tensor, **arguments: Any) -> Tensor:
        """Call `generate` of a language model with the trainable vector `[P]`, without dropout."""
        weights = {
            f"model.{name}": w.to(self.dtype) for name, w in self.space.unflatten(vector).items()
        }
        with torch.no_grad(), self._lock:
            found: Tensor = torch.func.functional_call(
                Generation(self.model), weights, (), arguments
            )
        return found

    def records_at_once(self, device: torch.device) -> int:
        """Return how many records the first pass of `scores` has on this kind of device."""
        return 16 * self.rows if device.type == "cuda" else self.rows

    def _scores(self, weights: dict[str, Tensor], inputs: Batch, rows: float) -> Tensor:
        count = len(next(iter(inputs.values())))
        step = max(1, int(rows))
        parts = []
        with torch.no_grad(), self._lock:
            for i in range(0, max(count, 1), step):
                part = {name: x[i : i + step] for name, x in inputs.items()}
                parts.append(self.forward(self.model, dict(weights), part))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _copies(self, theta: Tensor, client: Tensor) -> list[Tensor]:
        layout = self._copy_layout
        rows = layout.rows(theta, self.dtype)
        if theta.shape[0] == 1:
            spread = rows.expand(len(client), -1)
        else:
            spread = rows.index_select(0, client)
        copies = []
        for i, shape in enumerate(self.space.shapes):
            sides = tuple(reversed(shape)) if self._transposed[i] else shape
            flat = spread[:, layout.starts[i] : layout.starts[i] + shape.numel()]
            copies.append(flat.view(len(client), *sides).detach().requires_grad_(True))
        return copies


def _transposed(model: nn.Module, space: Space) -> list[bool]:
    """Return for each trainable tensor True if its copies are transposed: the linear weights.

    A linear layer multiplies by the transpose of its weight, so autograd computes the transposed
    gradient. If the copies are transposed too, this gradient is used without another copy.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        type(modules.get(name.rpartition(".")[0])) is BatchedLinear and len(shape) == 2
        for name, shape in zip(space.names, space.shapes, strict=True)
    ]


def call(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
    """Call the model with these weights and with the inputs as keyword arguments.

    Return the `.logits` of its output if there are any, otherwise the output, which must be a
    tensor.
    """
    out = torch.func.functional_call(model, weights, (), dict(inputs))
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor):
        raise DpfedError(
            f"{type(model).__name__} returns {type(out).__name__} without logits, "
            "so it has no loss here"
        )
    return logits


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs with floating-point tensors converted to `dtype`.

    Numbers below the range of `dtype` first become its lowest number, so that masks stay finite.
    """
    if dtype == torch.float32:
        return inputs
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return {
        name: x.clamp_min(least).to(dtype) if x.is_floating_point() else x
        for name, x in inputs.items()
    }


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name all parameters that require a gradient; they form the flat vector."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise DpfedError("the model has no trainable tensor: set model.train to lora, full or head")
    return found


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise DpfedError if a batch norm of the model mixes the records of a batch."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        learns = any(p.requires_grad for p in module.parameters())
        # A batch norm without running statistics mixes records in eval mode too.
        if module.training or learns or module.running_mean is None:
            raise DpfedError(
                f"{name} is a {type(module).__name__} that mixes the records of a batch, so no "
                "record's gradient is its own: replace it by GroupNorm, or keep it frozen in eval "
                "mode (model.eval() and train = lora or head)"
            )


def has_experts(model: nn.Module) -> bool:
    """Return True for a mixture of experts, by the class names of its modules.

    An expert computes the tokens of all records of a pass in one product. The size of this product
    depends on all records, and the size decides how a record's numbers are rounded.
    """
    names = {type(module).__name__.lower() for module in model.modules()}
    return any("experts" in name or name.endswith(("moe", "moeblock")) for name in names)


def install_batched_layers(model: nn.Module, space: Space) -> None:
    """Change the class of every module that uses a trainable tensor to a batched layer, in place.

    A batched layer computes with separate weights for each record. If several modules use a tied
    tensor, all of them change.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {id(parameters[name]) for name in space.names}
    map_whole_modules(model, trained)
    for tensor, parameter in parameters.items():
        if id(parameter) not in trained:
            continue
        owner = tensor.rpartition(".")[0]
        # A container has no forward pass. Its parent uses the tensor, so change the parent.
        while isinstance(modules[owner], CONTAINERS):
            owner = owner.rpartition(".")[0]
        parent = modules.get(owner.rpartition(".")[0])
        _install_batched(modules[owner], owner, parent, trained)


def _install_batched(
    module: nn.Module, name: str, parent: nn.Module | None, trained: set[int]
) -> None:
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq
    ):
        raise DpfedError(
            f"{name} is an Embedding with max_norm or scale_grad_by_freq, which mix records: "
            "switch them off"
        )
    mapped = hasattr(module, "_plain_dims") or hasattr(module, "_windows")
    if mapped or type(module) in BATCHED_LAYERS.values():
        return
    batched = BATCHED_LAYERS.get(type(module))
    if batched is not None and all(id(p) in trained for p in module.parameters()):
        module.__class__ = batched
    elif not install_swin_bias(module, parent):
        module._plain_dims = {n: p.dim() for n, p in module.named_parameters()}  # type: ignore[assignment]
        module.__class__ = vmap_layer(type(module))

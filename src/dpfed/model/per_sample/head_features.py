"""Split a model into its frozen layers and its head, so that the head trains on stored features.

If only the head is trained, the head's input for a record is the same at every step. This input is
called the record's features. Features are computed once, and the head then trains on them like a
small model.
The frozen layers and the head are two PerSample objects, which compute per-sample gradients. They
have the same modules but different forward passes, so both use the same trainable vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.model.per_sample.gradients import Batch, Forward, PerSample

FEATURES = "features"
DROPOUT = "the model has dropout or stochastic depth"
# Least number of records in one forward pass of the head, which needs little memory.
ROWS = 8192


class _NotSeparableError(Exception):
    """The model cannot be split: its output does not follow from the head's input alone."""


@dataclass(frozen=True)
class HeadSplit:
    """A model that is split into frozen layers and a head, to be called one after the other.

    frozen  reads records; its output is the features, which are the head's input
    head    reads features; its scores equal the scores of the whole model
    size    bytes of one record's features
    """

    frozen: PerSample
    head: PerSample
    size: int


def split(model: PerSample, theta: Tensor, blank: Batch) -> HeadSplit | str:
    """Return the split model, or the reason why the model cannot be split.

    theta  initial values of the P trainable numbers, `[P]`
    blank  records without private data, on which the split is tested
    """
    found: HeadSplit | str = "what is trained is not one module behind a frozen part"
    for name in heads_of(model.model, model.space.names):
        found = _split_at(name, model, theta, blank)
        if isinstance(found, HeadSplit):
            break
    return found


def _split_at(name: str, model: PerSample, theta: Tensor, blank: Batch) -> HeadSplit | str:
    if any(not layer.startswith(f"{name}.") for layer in model.dropout):
        return (
            f"{DROPOUT} before {name} (model.drop_path = 0 switches it off for images, "
            "model.dropout = 0 for texts)"
        )
    frozen = model.through(_up_to(name, model.forward), name)
    head = model.through(_from(name), name)
    head.rows = max(ROWS, model.rows)
    # Compare with changed weights, because a head of zeros would hide a difference.
    moved = theta + torch.linspace(-0.1, 0.1, len(theta), device=theta.device)
    try:
        features = frozen.scores(moved, blank)
        unmoved_features = frozen.scores(theta, blank)
        size = features[0].numel() * features.element_size()
        head_scores = head.scores(moved, {FEATURES: features})
        model_scores = model.scores(moved, blank)
    except Exception:
        # Models raise errors of many classes here. After any error, do not split the model.
        return (
            f"the output of {type(model.model).__name__} is not that of {name} for one tensor "
            "of numbers"
        )
    if not _equal_up_to_rounding(head_scores, model_scores):
        return f"{name} gives another output by itself than in {type(model.model).__name__}"
    if not _equal_up_to_rounding(features, unmoved_features):
        return f"what enters {name} follows from its own weights too"
    return HeadSplit(frozen, head, size)


def _equal_up_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Return True if the tensors are equal or differ so little that rounding explains it."""
    step = 100 * torch.finfo(other.dtype).eps
    return one.shape == other.shape and torch.allclose(one, other, step, step)


def heads_of(model: nn.Module, trained: tuple[str, ...]) -> list[str]:
    """Return the names of the modules that may be the head, the innermost first.

    A possible head contains every trained tensor. The rest of the model has frozen tensors and no
    trained tensor.
    """
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in trained), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained_ids = {id(parameters[tensor]) for tensor in trained}
    found = []
    for depth in range(len(common), 0, -1):
        name = ".".join(common[:depth])
        outside = {id(p) for tensor, p in parameters.items() if not tensor.startswith(f"{name}.")}
        if outside and not outside & trained_ids:
            found.append(name)
    return found


def _up_to(name: str, forward: Forward) -> Forward:
    def features(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        head_inputs: list[Tensor] = []
        head_outputs: list[Any] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            one_tensor = len(args) == 1 and not kwargs and torch.is_tensor(args[0])
            if not one_tensor or not args[0].is_floating_point():
                raise _NotSeparableError
            # Copy the input, because a head may begin with an in-place operation.
            head_inputs.append(args[0].detach().clone())

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            head_outputs.append(out)

        head = model.get_submodule(name)
        hooks = [
            head.register_forward_pre_hook(before, with_kwargs=True),
            head.register_forward_hook(after),
        ]
        try:
            scores = forward(model, weights, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        is_last = len(head_outputs) == 1 and head_outputs[0] is scores
        records = len(next(iter(inputs.values())))
        if not is_last or head_inputs[0].dim() < 2 or len(head_inputs[0]) != records:
            raise _NotSeparableError
        return head_inputs[0]

    return features


def _from(name: str) -> Forward:
    def scores(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        own = {tensor.removeprefix(f"{name}."): w for tensor, w in weights.items()}
        head = model.get_submodule(name)
        out: Tensor = torch.func.functional_call(head, own, (inputs[FEATURES],))
        return out

    return scores

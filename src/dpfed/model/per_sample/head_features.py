"""The frozen part of a model apart from its head.

Where the head alone is trained, what enters it is the same for a record at every step: it can be computed once ("features"),
and the head then trains on it like a linear model. Names, vector, copies and dropout are those of the whole model, because
both parts are ways through it and not models of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.model.per_sample.gradients import Batch, Forward, PerSample

FEATURES = "features"
DROPOUT = "the model has dropout or stochastic depth"
ROWS = 8192  # a head takes more records at once than the model before it


class _WholeError(Exception):
    """What enters the head is not all that the output follows from."""


@dataclass(frozen=True)
class HeadSplit:
    """frozen: its scores are the features. head: takes features for records. size: bytes of one record's features."""

    frozen: PerSample
    head: PerSample
    size: int


def split(model: PerSample, theta: Tensor, blank: Batch) -> HeadSplit | str:
    """The two parts, tried on blank records; or why there are none, as the end of a sentence."""
    found: HeadSplit | str = "what is trained is not one module behind a frozen part"
    for name in heads_of(model.model, model.space.names):
        found = _split_at(name, model, theta, blank)
        if isinstance(found, HeadSplit):
            break
    return found


def _split_at(name: str, model: PerSample, theta: Tensor, blank: Batch) -> HeadSplit | str:
    if any(not layer.startswith(f"{name}.") for layer in model.dropout):
        return f"{DROPOUT} before {name} (model.drop_path = 0 switches it off for images, model.dropout = 0 for texts)"
    frozen, head = (
        model.through(_up_to(name, model.forward), name),
        model.through(_from(name), name),
    )
    head.rows = max(ROWS, model.rows)
    moved = theta + torch.linspace(
        -0.1, 0.1, len(theta), device=theta.device
    )  # a head of zeros would hide a difference
    try:
        features, begun = frozen.scores(moved, blank), frozen.scores(theta, blank)
        size = features[0].numel() * features.element_size()
        alone, within = head.scores(moved, {FEATURES: features}), model.scores(moved, blank)
    except (
        Exception
    ):  # a model of any make is tried here, and without features it is computed as a whole
        return f"the output of {type(model.model).__name__} is not that of {name} for one tensor of numbers"
    if alone.shape != within.shape or not torch.allclose(alone, within, *_rounding(within.dtype)):
        return f"{name} gives another output by itself than in {type(model.model).__name__}"
    if not torch.allclose(features, begun, *_rounding(features.dtype)):
        return f"what enters {name} follows from its own weights too"
    return HeadSplit(frozen, head, size)


def _rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Relative and absolute: the same sums in another order."""
    step = torch.finfo(dtype).eps
    return 100 * step, 100 * step


def heads_of(model: nn.Module, trained: tuple[str, ...]) -> list[str]:
    """The modules that hold every trained tensor, the innermost first, where nothing outside uses one of them and something
    is frozen there."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in trained), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ours = {id(parameters[tensor]) for tensor in trained}
    found = []
    for depth in range(len(common), 0, -1):
        name = ".".join(common[:depth])
        outside = {id(p) for tensor, p in parameters.items() if not tensor.startswith(f"{name}.")}
        if outside and not outside & ours:
            found.append(name)
    return found


def _up_to(name: str, forward: Forward) -> Forward:
    """The forward pass, whose result is what entered the head."""

    def features(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        entered: list[Tensor] = []
        left: list[Any] = []

        def before(module: nn.Module, args: tuple[Any, ...], keys: dict[str, Any]) -> None:
            if (
                len(args) != 1
                or keys
                or not isinstance(args[0], Tensor)
                or not args[0].is_floating_point()
            ):
                raise _WholeError
            entered.append(args[0].detach().clone())  # a head may begin with an operation in place

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            left.append(out)

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
        records = len(next(iter(inputs.values())))
        if (
            len(left) != 1
            or left[0] is not scores
            or entered[0].dim() < 2
            or len(entered[0]) != records
        ):
            raise _WholeError
        return entered[0]

    return features


def _from(name: str) -> Forward:
    """The head alone, under the names that its tensors have in the model."""

    def scores(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        own = {tensor.removeprefix(f"{name}."): w for tensor, w in weights.items()}
        out: Tensor = torch.func.functional_call(
            model.get_submodule(name), own, (inputs[FEATURES],)
        )
        return out

    return scores

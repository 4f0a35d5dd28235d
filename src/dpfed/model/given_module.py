"""The model "given": a torch module that a program passes to `dpfed.fine_tune`.

Only this program has the module's code, so no other program can build the model from its
configuration. The folder in `model.weights` holds only its weights.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from dpfed.config import ModelSection
from dpfed.config.sections import Trainable
from dpfed.errors import DpfedError, reason
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built, Prepare
from dpfed.model.zoo.pretrained import load_tensors, on_meta

_given: ContextVar[nn.Module | None] = ContextVar("given", default=None)


@contextmanager
def given_module(module: nn.Module | None) -> Iterator[None]:
    """Within this context, let the setting `model.name = "given"` build a copy of `module`."""
    token = _given.set(module)
    try:
        yield
    finally:
        _given.reset(token)


@dataclass(frozen=True)
class GivenModule(ModelSection):
    name: str = "given"
    train: Annotated[Trainable, "what is trained: the whole module, its last layer, adapters"] = (
        "full"
    )

    def usual_spec(self) -> InputSpec:
        return InputSpec("features", "features", (8,), 2)

    def build(self, spec: InputSpec) -> Built:
        module = _given.get()
        if module is None:
            raise DpfedError(
                "this run's model was handed over by a program, so only that program can build it "
                "again: call dpfed.load(folder, model=...) there"
            )
        model = copy.deepcopy(module).float()
        if self.weights not in (None, "given") and not on_meta():
            load_tensors(model, str(self.weights), type(module).__name__)
        prepare = _prepare(model, spec)
        if on_meta():
            model = model.to("meta")
        else:
            _refuse_other_scores(model, spec, prepare)
        return Built(model, _head(model), prepare)


def _prepare(model: nn.Module, spec: InputSpec) -> Prepare:
    """Return the function that turns records into the module's argument.

    It divides pixels by the largest possible value, such as 255. It leaves feature vectors
    unchanged.
    """
    if spec.kind == "text":
        raise DpfedError(
            "a torch module reads numbers, and the data are texts: give a Hugging Face model"
        )
    argument = _argument(model)
    scale = spec.white if spec.kind == "image" else 1.0

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {argument: inputs[spec.name].float() / scale}

    return prepare


def _argument(model: nn.Module) -> str:
    """Return the name of the module's first argument, which takes the records."""
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    named = [p for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    if not named or [p.name for p in named[1:] if p.default is p.empty]:
        raise DpfedError(
            f"{name}.forward takes {', '.join(parameters) or 'no argument'}: "
            "it must take one argument, a batch of records"
        )
    if next(model.children(), None) is None:
        raise DpfedError(f"{name} is a single layer: give torch.nn.Sequential({name}(...))")
    return named[0].name


def _refuse_other_scores(model: nn.Module, spec: InputSpec, prepare: Prepare) -> None:
    """Raise DpfedError if the module's output for a record is not one score for each class.

    For "regress" the output must be one number for each record.
    """
    name = type(model).__name__
    records = prepare(spec.synthetic(2, torch.Generator().manual_seed(0)))
    try:
        with torch.no_grad():
            scores = copy.deepcopy(model).eval()(**records)
    except Exception as error:
        # Catch all errors, because modules raise errors of many classes for inputs of a wrong
        # shape.
        shape = tuple(next(iter(records.values())).shape)
        raise DpfedError(
            f"{name} cannot compute a batch of shape {shape}: {reason(error)}"
        ) from None
    scores = getattr(scores, "logits", scores)
    shapes: list[tuple[int, ...]] = [(2, spec.classes)]
    need = f"the data have {spec.classes} classes"
    if spec.task == "regress":
        # For regression the output may be a column, `[2, 1]`, or a plain list of numbers, `[2]`.
        shapes.append((2,))
        need = "a label is one number"
    if not isinstance(scores, Tensor) or scores.shape not in shapes:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise DpfedError(
            f"{name} gives {found} for 2 records, and {need}: "
            f"its output must have the shape {shapes[0]}"
        )


def _head(model: nn.Module) -> str:
    """Return the name of the module's last layer, which counts as its head.

    A layer is a module with parameters that do not belong to its children.
    """
    layers: list[str] = [
        name
        for name, layer in model.named_modules()
        if name and next(layer.parameters(recurse=False), None) is not None
    ]
    if not layers:
        raise DpfedError(f"{type(model).__name__} has no parameters that could be trained")
    return layers[-1]

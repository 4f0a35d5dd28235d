"""Build a model from its `[model]` section without data: modules, adapters, flat vector, blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.blocks import architecture_of, block_index, inner_config
from dpfed.model.frozen.quantised import number_of_weights
from dpfed.model.frozen.unused_parameters import freeze_unused
from dpfed.model.lora import Adapted, adapt
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.gradients import trainable
from dpfed.model.target_units import to_standard_unit
from dpfed.model.task import InputSpec, task_of, weighted
from dpfed.model.zoo.built import ATTENTION_DROPOUT, Built


@dataclass(frozen=True)
class AssembledModel:
    """A model with adapters, ready for training.

    built    the model before adapters were added, with its task and input preparation
    adapted  the model with adapters; its trainable tensors are marked
    space    the layout of the trainable tensors in one flat vector; its block index is on the CPU
    total    number of all parameters, trainable or not
    notes    sentences to show to the user
    """

    built: Built
    adapted: Adapted
    space: Space
    total: int
    notes: tuple[str, ...]

    @property
    def head(self) -> str:
        """Name of the layer or module that computes the output; "" for a language model."""
        head = self.built.head
        return head if isinstance(head, str) else next(iter(head), "")


def assemble(
    section: ModelSection,
    spec: InputSpec,
    seeds: tuple[int, int] = (0, 0),
    granularity: Literal["block", "tensor"] = "block",
) -> AssembledModel:
    """Build the model of a `[model]` section, with its adapters and its flat vector.

    spec         kind, shape and classes of the records
    seeds        random seeds of the initial weights and of the initial adapters
    granularity  "block" divides the vector by the rules in `model.blocks`; "tensor" makes each
                 tensor one block
    """
    buildable: Any = section
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds[0])
        built: Built = buildable.build(spec)
    task = built.task if built.task.causal else task_of(spec)
    built = replace(built, task=weighted(task, section.class_weights, spec.classes))
    total = number_of_weights(built.model)
    adapted = adapt(built.model, section, built.head, seeds[1])
    model = adapted.model
    if spec.task == "regress" and (section.adapter or getattr(section, "head", None) == "kept"):
        head = built.head if isinstance(built.head, str) else built.head[0]
        to_standard_unit(model, head, spec)
    unused = freeze_unused(model, built, spec)
    shapes = {name: p.shape for name, p in trainable(model).items()}
    architecture = architecture_of(model, section.qkv_layout, section.attention)
    notes = [*built.notes, *adapted.notes, *unused]
    if architecture is None:
        if section.qkv_layout != "auto":
            raise DpfedError(
                f"model.qkv_layout = {section.qkv_layout!r}: {type(model).__name__} is not known "
                "here, so name its projections too, for example model.attention = ['qkv']"
            )
        notes.append(f"{type(model).__name__} has no block rules here: each tensor is one block")
    if any(getattr(inner_config(model), key, 0) for key in ATTENTION_DROPOUT):
        notes.append(
            "dropout inside attention is off: it has no key per record; all other dropout is on"
        )
    _refuse_unknown(model, section.attention)
    try:
        names, blocks = block_index(model, shapes, architecture, granularity)
        space = Space(tuple(shapes), tuple(shapes.values()), tuple(names), blocks)
    except ValueError as error:
        raise DpfedError(
            f"the blocks of {type(model).__name__} cannot be formed: {error}"
        ) from None
    return AssembledModel(built, adapted, space, total, tuple(notes))


def _refuse_unknown(model: nn.Module, attention: tuple[str, ...]) -> None:
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in attention:
        if name not in known:
            raise DpfedError(
                f"model.attention: {type(model).__name__} has no module called {name!r}"
            )


def describe_space(
    section: ModelSection,
    spec: InputSpec,
    granularity: Literal["block", "tensor"] = "block",
) -> AssembledModel:
    """Build the model of a `[model]` section without values, to describe its trainable numbers.

    PyTorch's meta device holds tensors with shapes but no values. Building takes about a second and
    almost no memory, however large the model is.
    """
    with torch.device("meta"):
        return assemble(section, spec, (0, 0), granularity)


def block_sizes(space: Space) -> dict[str, int]:
    """Return the number of trainable parameters in each block, by the name of the block.

    A block is a group of parameters that share one second moment.
    """
    counts = torch.bincount(space.blocks, minlength=space.num_blocks).tolist()
    return dict(zip(space.block_names, counts, strict=True))

"""Compilation that may fail: layer by layer if it can be, else the model as a whole, else not at all. No run fails of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

LOG = logging.getLogger("dpfed")
# Share of activations kept for the backward pass. Cheap ones beyond it are computed again: a hundredth of the time of a step,
# a sixth of its memory where it was measured (docs/performance.md).
KEPT = 0.8


class Compiled:
    """`plain`, a function that calls the model, compiled in the first way that works.

    Layers of one kind are one compilation, for each shape of batch; the whole model takes many times as long.
    """

    def __init__(self, plain: Callable[..., Tensor], model: nn.Module, **options: Any) -> None:
        # Each kind of layer in each stage is a version of one function, of which eight are allowed by default.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._plain, self._layers, self._options = (
            plain,
            repeated(model),
            {"dynamic": False, **options},
        )
        self._ways = [
            *([("layer by layer", self._by_layers)] if self._layers else []),
            ("as a whole", self._whole),
        ]
        self._now: Callable[..., Tensor] | None = None

    def __call__(self, *arguments: Any) -> Tensor:
        while self._ways:
            try:
                self._now = self._now or self._ways[0][1]()
                with torch._functorch.config.patch(activation_memory_budget=KEPT):
                    return self._now(*arguments)
            except torch.OutOfMemoryError:
                raise
            except (
                Exception
            ) as error:  # compilers fail in many ways, and none of them is worth a run
                self._give_up(error)
        return self._plain(*arguments)

    def _by_layers(self) -> Callable[..., Tensor]:
        for layer in self._layers:
            layer.compile(**self._options)
        return self._plain

    def _whole(self) -> Callable[..., Tensor]:
        compiled: Callable[..., Tensor] = torch.compile(self._plain, **self._options)
        return compiled

    def _give_up(self, error: Exception) -> None:
        how, _ = self._ways.pop(0)
        self._now = None
        for layer in self._layers:
            layer._compiled_call_impl = None
        LOG.warning(
            "the model cannot be compiled %s and runs without it: %s", how, reason_of(error)
        )


def reason_of(error: Exception) -> str:
    """The first words of an error that say something; compilers begin with who has raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:240]


def repeated(model: nn.Module) -> list[nn.Module]:
    """The layers that a model has rows of: members of the innermost lists whose members are of one kind."""

    def is_row(module: nn.Module) -> bool:
        return (
            isinstance(module, nn.ModuleList)
            and len(module) > 1
            and len({type(layer) for layer in module}) == 1
        )

    def is_innermost(row: nn.Module) -> bool:
        return not any(is_row(inner) for layer in row.children() for inner in layer.modules())

    rows = [module for module in model.modules() if is_row(module) and is_innermost(module)]
    return [layer for row in rows for layer in row.children()]

"""Compile a model layer by layer if possible, otherwise as a whole, otherwise not at all.

If a compilation fails, a warning is logged and the next way is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

LOG = logging.getLogger("dpfed")
# Fraction of the activations that the compiler may store for the backward pass. Computing the
# others again takes 1 % more time and saves a sixth of the memory (docs/performance.md).
ACTIVATION_BUDGET = 0.8


class Compiled:
    """A compiled version of the function `plain`, which calls `model`.

    Compilation layer by layer is tried first: layers of one class share one compilation for each
    batch shape. The second attempt compiles the whole model, which takes many times as long. If
    both fail, calls go to `plain`.

    checkpoints  True stores only the inputs of each layer for the backward pass. Only compilation
                 layer by layer can do this, so the whole model is then never compiled.
    """

    def __init__(
        self,
        plain: Callable[..., Tensor],
        model: nn.Module,
        checkpoints: bool = False,
        **options: Any,
    ) -> None:
        # torch.compile limits the recompilations of one function. All layers count as one function,
        # so the default limit of 8 is too low.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._plain = plain
        self._layers = repeated_layers(model)
        self._options = {"dynamic": False, **options}
        self._budget = 0.0 if checkpoints else ACTIVATION_BUDGET
        self._ways: list[tuple[str, Callable[[], Callable[..., Tensor]]]] = [
            ("layer by layer", self._by_layers),
            ("as a whole", lambda: torch.compile(self._plain, **self._options)),
        ]
        if not self._layers:
            self._ways.pop(0)
        elif checkpoints:
            self._ways.pop()
        self._current: Callable[..., Tensor] | None = None

    def __call__(self, *arguments: Any) -> Tensor:
        while self._ways:
            try:
                self._current = self._current or self._ways[0][1]()
                with torch._functorch.config.patch(activation_memory_budget=self._budget):
                    return self._current(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # Catch all errors, because compilers raise errors of many classes. The code then
                # compiles in the next way, or runs uncompiled.
                self._give_up(error)
        return self._plain(*arguments)

    def _by_layers(self) -> Callable[..., Tensor]:
        for layer in self._layers:
            layer.compile(**self._options)
        return self._plain

    def _give_up(self, error: Exception) -> None:
        how, _ = self._ways.pop(0)
        self._current = None
        for layer in self._layers:
            layer._compiled_call_impl = None
        LOG.warning(
            "the model cannot be compiled %s and runs without it: %s", how, reason_of(error)
        )


def reason_of(error: Exception) -> str:
    """Return an error's reason: the first line of its message, cut to 240 characters.

    The first line of a compiler's message may end with a colon and give no reason. The second line
    is then included.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:240]


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated layers, such as the blocks of a Transformer.

    They are the members of module lists whose members all have one class. If such lists are nested,
    as in Swin's stages, only the innermost lists count.
    """

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

"""Find the layer of a model in which a computation fails, to name it in an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn


def failing_layer(model: nn.Module, compute: Callable[[], object]) -> str:
    """Call `compute` and return the layer in which it fails, as the string " in NAME (CLASS)".

    The innermost layer counts. Return "" if no layer raises an error.
    """
    entered: list[tuple[str, nn.Module]] = []

    def enter(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: entered.append((name, module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.pop()

    hooks = []
    for name, module in model.named_modules():
        if name:
            hooks += [
                module.register_forward_pre_hook(enter(name)),
                module.register_forward_hook(leave),
            ]
    try:
        with suppress(Exception):
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    if not entered:
        return ""
    name, module = entered[-1]
    kind = type(module).__name__.removeprefix("Mapped").removeprefix("Batched")
    return f" in {name} ({kind})"

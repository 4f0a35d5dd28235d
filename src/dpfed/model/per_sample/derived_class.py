"""Create subclasses of layer classes, which change the behaviour of existing layers.

The attribute `__class__` of an existing layer is set to such a subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

MakeClass = Callable[[type[nn.Module]], type[nn.Module]]


def once_per_class(make: MakeClass) -> MakeClass:
    """Return `make`, which creates a class, with a cache: equal layer classes get one new class.

    torch.compile then compiles these layers only once.
    """
    cached: MakeClass = functools.cache(make)  # type: ignore[assignment]
    return cached


def derived(cls: type[nn.Module], prefix: str, **members: Any) -> type[nn.Module]:
    """Return a subclass of `cls` with the methods and attributes `members`.

    Its name is `prefix` followed by the name of `cls`.
    """
    return type(f"{prefix}{cls.__name__}", (cls,), {**members, "__module__": __name__})

"""Create subclasses of layer classes. Existing layers then get such a subclass as their class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

MakeClass = Callable[[type[nn.Module]], type[nn.Module]]


def once_per_class(make: MakeClass) -> MakeClass:
    """Return `make` with a cache, so that it returns one subclass for all layers of a class.

    torch.compile then compiles such layers once.
    """
    cached: MakeClass = functools.cache(make)  # type: ignore[assignment]
    return cached


def derived(cls: type[nn.Module], prefix: str, **members: Any) -> type[nn.Module]:
    """Return a subclass of `cls` with these methods; its name is `prefix` + the name of `cls`."""
    return type(f"{prefix}{cls.__name__}", (cls,), {**members, "__module__": __name__})

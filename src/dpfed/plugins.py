"""Algorithms and models that installed packages add through entry points."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dpfed.errors import DpfedError, reason


def with_plugins(noun: str, base: type[Any], own: Mapping[str, type[Any]]) -> dict[str, type[Any]]:
    """Return the classes of dpfed by name, followed by those of installed packages.

    noun  "algorithm" or "model"; selects the entry point group "dpfed.algorithms" or
          "dpfed.models"
    base  the class that every plugin must extend
    own   the classes that dpfed has itself; a plugin may not have the name of one of them
    """
    points = _entry_points(f"dpfed.{noun}s", tuple(sys.path))
    for name, point in points.items():
        if name in own:
            raise DpfedError(
                f"the package {_package(point)} adds the {noun} {name!r}, a name that dpfed has "
                "itself: rename it in the package, or uninstall the package"
            )
    return {**own, **{name: _load(point, noun, base) for name, point in points.items()}}


@functools.cache
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points of a group, such as "dpfed.models", by name.

    path  the present sys.path, which is part of the cache key: a change of sys.path gives a new
          answer
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other is not point:
            raise DpfedError(
                f"the packages {_package(other)} and {_package(point)} both add {point.name!r} to "
                f"{group}: uninstall one of them"
            )
    return found


def _load(point: EntryPoint, noun: str, base: type[Any]) -> type[Any]:
    """Import and return the class that the entry point of a plugin package names."""
    package = _package(point)
    try:
        found = point.load()
    except Exception as error:
        # The code of another package can raise errors of any class when it is imported.
        raise DpfedError(
            f"the {noun} {point.name!r} of the package {package} cannot be imported: "
            f"{reason(error)}: repair or uninstall the package"
        ) from None
    fits = inspect.isclass(found) and issubclass(found, base) and not inspect.isabstract(found)
    if not fits or getattr(found, "name", None) != point.name:
        raise DpfedError(
            f"the package {package} gives {point.value} as the {noun} {point.name!r}: it must be "
            f"a complete subclass of {base.__module__}.{base.__name__} with name = {point.name!r}"
        )
    loaded: type[Any] = found
    return loaded


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module

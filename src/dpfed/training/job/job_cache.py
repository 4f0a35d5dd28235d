"""Share records, models and features between the jobs of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Identity:
    """Cache key that equals another if both hold the very same object.

    The key keeps its object alive, so no later object can get the same `id`.
    """

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class JobCache:
    """Cache with one entry of each kind; another key replaces the entry.

    lock  held while a job is prepared, because initial weights use torch's global generator
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._entries: dict[str, tuple[Hashable, Any]] = {}
        self._purpose: Any = None

    def only_for(self, purpose: Any) -> None:
        """Drop all entries if they were made for another purpose."""
        with self.lock:
            if purpose != self._purpose:
                self._entries.clear()
                self._purpose = purpose

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return the entry of this kind and key, made now if it is missing."""
        with self.lock:
            if kind not in self._entries or self._entries[kind][0] != key:
                # The old entry goes first, so that two large ones are never in memory.
                self._entries.pop(kind, None)
                self._entries[kind] = (key, make())
            entry: T = self._entries[kind][1]
            return entry

    def clear(self) -> None:
        """Drop all entries to free their memory."""
        with self.lock:
            self._entries.clear()

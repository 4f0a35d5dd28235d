"""Cache of records, models and features that the jobs (prepared runs) of one process share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Identity:
    """Cache key that contains an object. Two keys are equal only if they contain the same object.

    The key keeps the object alive, because a new object could otherwise get the same `id`.
    """

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class JobCache:
    """Cache that the jobs (prepared runs) of a process share, with one entry per kind of object.

    If an object of a kind is stored under a new key, it replaces the old entry of this kind.

    lock  allows only one job at a time to be prepared, because initial weights are drawn from
          torch's global random generator
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._entries: dict[str, tuple[Hashable, Any]] = {}
        self._purpose: Any = None

    def only_for(self, purpose: Any) -> None:
        """Keep the entries only if the last call had an equal `purpose`; otherwise delete all."""
        with self.lock:
            if purpose != self._purpose:
                self._entries.clear()
                self._purpose = purpose

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return the stored entry of this kind if it was stored under `key`.

        Otherwise call `make`, store its result in place of the old entry, and return it.
        """
        with self.lock:
            if kind not in self._entries or self._entries[kind][0] != key:
                # Delete the old entry before the new one is made, so that memory does not hold two
                # large entries.
                self._entries.pop(kind, None)
                self._entries[kind] = (key, make())
            entry: T = self._entries[kind][1]
            return entry

    def clear(self) -> None:
        """Delete all entries to free their memory."""
        with self.lock:
            self._entries.clear()

"""A callback made of functions, for tests that watch a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfed.training.callbacks.base import Callback


def ignore(event: Any) -> None:
    """Do nothing."""


class Watcher(Callback):
    """Call one function for each event; the others do nothing."""

    def __init__(
        self,
        on_start: Callable[[Any], Any] = ignore,
        on_round: Callable[[Any], Any] = ignore,
        on_checkpoint: Callable[[Any], Any] = ignore,
        on_activity: Callable[[Any], Any] = ignore,
    ) -> None:
        self.on_start = on_start  # type: ignore[method-assign]
        self.on_round = on_round  # type: ignore[method-assign]
        self.on_checkpoint = on_checkpoint  # type: ignore[method-assign]
        self.on_activity = on_activity  # type: ignore[method-assign]

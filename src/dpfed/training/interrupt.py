"""Being asked to stop. A signal is only noted; the fleet looks between two local steps, so that nothing is half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dpfed.errors import InterruptedRunError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Called between local steps; raises when a signal has come. `gently`: from when on signals are only noted."""

    def __init__(self) -> None:
        self.gently = False
        self._asked: signal.Signals | None = None

    def __call__(self) -> None:
        if self._asked is not None:
            raise InterruptedRunError(self._asked.name, self._asked)

    def handle(self, number: int, frame: FrameType | None) -> None:
        asked = signal.Signals(number)
        if self.gently and self._asked is None:
            self._asked = asked
            # Not print: the signal may have come in the middle of one.
            os.write(
                2,
                f"{asked.name}: stopping after this local step; once more to stop at once\n".encode(),
            )
        elif asked is signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os.write(2, f"dpfed: stopped by {asked.name}.\n".encode())
            raise SystemExit(128 + number)


@contextmanager
def on_signals() -> Iterator[Stop]:
    """SIGTERM and Ctrl-C ask to stop while this lasts. Only a main thread may handle signals; elsewhere nothing changes."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

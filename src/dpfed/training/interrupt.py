"""Stop a run on SIGTERM or Ctrl-C after the current local step, so that no step is incomplete."""

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
    """Receiver of SIGTERM and Ctrl-C. The training loop calls it after each local step.

    The call raises InterruptedRunError if a signal has arrived.

    gently  True: the first signal requests a stop, and a second signal ends the process at once.
            False: the first signal ends the process at once.
    """

    def __init__(self) -> None:
        self.gently = False
        self._signal: signal.Signals | None = None

    def __call__(self) -> None:
        if self._signal is not None:
            raise InterruptedRunError(self._signal.name, self._signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self.gently and self._signal is None:
            self._signal = received
            # Use os.write. A `print` in a signal handler raises an error if the signal has
            # interrupted another `print`.
            notice = f"{received.name}: stopping after this local step; once more to stop at once\n"
            os.write(2, notice.encode())
        elif received is signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os.write(2, f"dpfed: stopped by {received.name}.\n".encode())
            raise SystemExit(128 + number)


@contextmanager
def on_signals() -> Iterator[Stop]:
    """Yield a Stop object that receives SIGTERM and Ctrl-C until the context ends.

    Outside the main thread it receives no signals, because Python allows no handlers there.
    """
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

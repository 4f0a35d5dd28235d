"""Run a command that can be interrupted when its time is over."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# An interrupted command has this many seconds to end, after each of so many signals.
PATIENCE = 15.0
TRIES = 4


def interruptible(command: Sequence[str], log: Path, seconds: float | None) -> int | None:
    """Run a command; send it SIGINT when the time is over or this process is stopped."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_us,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return None
        except BaseException:
            _interrupt(process)
            raise


def _end_with_us() -> None:
    """Make the child, which calls this, end with its parent and receive SIGINT.

    A parent that was started by nohup or in the background ignores SIGINT, and a child inherits it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    # `dpfed compare` ignores SIGINT while it starts a worker, so try several times.
    for _ in range(TRIES):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()

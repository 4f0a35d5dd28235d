"""Look at other processes of this machine by their ids."""

from __future__ import annotations

import time
from pathlib import Path


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: list[int], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while any(running(pid) for pid in pids):
        assert time.monotonic() < end, f"of the processes {pids} some still run"
        time.sleep(0.05)

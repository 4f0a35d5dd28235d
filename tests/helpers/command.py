"""Run the command line in this process."""

from __future__ import annotations

import sys

from dpfed.cli.main import main


def dpfed(*args: str) -> int:
    """Run the command like the console script and return its exit code."""
    old = sys.argv
    sys.argv = ["dpfed", *args]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = old
    return 0

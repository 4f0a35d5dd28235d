"""The short version of scripts/kill_chain.py, which has a stage of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "kill_chain.py"


def test_a_run_killed_three_times_ends_as_if_nobody_had_killed_it() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--kills",
        "3",
        "--lanes",
        "1",
        "--cases",
        "memory",
        "--seed",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["good"], said["kills"]) == (True, 3)

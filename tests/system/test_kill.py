"""kill -9 at many moments: a killed and resumed run ends as the run that nobody killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "kill_chain.py"


def killed_chains(*options: str) -> dict[str, Any]:
    """Run chains of killed and resumed runs, and return the summary that they print."""
    command = [sys.executable, str(PROGRAM), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.kill
@pytest.mark.timeout(960)
def test_fifty_kills_change_nothing() -> None:
    summary = killed_chains("--kills", "50", "--lanes", "2", "--seed", "0")
    assert summary["good"]
    assert summary["kills"] == 50


def test_three_kills_change_nothing() -> None:
    summary = killed_chains("--kills", "3", "--lanes", "1", "--cases", "memory", "--seed", "2")
    assert summary["good"]
    assert summary["kills"] == 3

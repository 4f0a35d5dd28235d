"""A server's memory grows with one message, not with the number of clients."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from loopback_trial import run_command

MEASURE = Path(__file__).parents[1] / "helpers" / "server_memory.py"


@pytest.mark.federation
@pytest.mark.timeout(300)
def test_twenty_messages_of_50_mb_take_less_than_400_mb(tmp_path: Path) -> None:
    output = run_command([sys.executable, str(MEASURE), "20", "50", str(tmp_path)], timeout=240)
    found = json.loads(output.splitlines()[-1])
    assert (found["answered"], found["right"], found["log"]) == (20, True, [])
    assert found["message_mb"] >= 50
    assert found["above_idle_mb"] < 400, found
    assert found["app_above_idle_mb"] < 400, found
    assert list(tmp_path.glob("replies-*")) == []

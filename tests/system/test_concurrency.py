"""Two processes at once: cache entries are whole, and a study has one owner."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CACHE = """
import sys, time
from pathlib import Path
import numpy as np
from dpfed.data.cache import cached
go = Path(sys.argv[2])
while not go.exists():
    time.sleep(0.005)
def build():
    time.sleep(0.05)
    return {"x": np.arange(200_000), "y": np.arange(200_000)[::-1].copy()}
for i in range(20):
    found = cached(f"key-{i}", build, Path(sys.argv[1]))
    assert (found["x"] == np.arange(200_000)).all(), i
    assert (found["x"] + found["y"] == 199_999).all(), i
print("whole")
"""
STUDY = [
    "compare",
    "--algorithms",
    "dp-fedavg,dp-local-adamw",
    "--seeds",
    "1",
    "--workers",
    "1",
    "--lr",
    "dp-fedavg=0.1,0.3",
    "--lr",
    "dp-local-adamw=0.01,0.03",
    "--set",
    "model.name=linear",
    "--set",
    "run.rounds=1",
    "--set",
    "run.local_steps=1",
    "--set",
    "privacy.sigma=2.0",
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def test_a_cache_that_two_processes_fill_at_once_is_whole_for_both(tmp_path: Path) -> None:
    script = tmp_path / "fill.py"
    script.write_text(textwrap.dedent(CACHE))
    both = [started(str(script), str(tmp_path / "cache"), str(tmp_path / "go")) for _ in range(2)]
    (tmp_path / "go").touch()
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, "whole"), err
    leftovers = [
        p.name
        for p in (tmp_path / "cache").iterdir()
        if p.name.startswith(".") or p.name.endswith(".part")
    ]
    assert leftovers == []


@pytest.mark.timeout(200)
def test_two_studies_in_one_folder_leave_one_whole_table(tmp_path: Path) -> None:
    """One study may find the folder in use, and says so."""
    out = tmp_path / "study"
    both = [started("-m", "dpfed", *STUDY, "--out", str(out)) for _ in range(2)]
    ended = [(process.communicate(timeout=180), process.returncode) for process in both]
    codes = sorted(code for _, code in ended)
    assert codes in ([0, 0], [0, 2]), ended
    for (_, err), code in ended:
        assert "Traceback" not in err
        assert code == 0 or "another process" in err or "at work" in err, err
    table = (out / "table.csv").read_text()
    assert table.count("dp-fedavg") >= 1
    assert table.count("dp-local-adamw") >= 1
    again = started("-m", "dpfed", *STUDY, "--out", str(out))
    again.communicate(timeout=180)
    assert again.returncode == 0
    assert (out / "table.csv").read_text() == table

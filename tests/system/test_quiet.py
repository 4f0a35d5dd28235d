"""A fresh process prints no warnings of the libraries beneath it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SMALL = ("--set", "run.rounds=1", "--set", "run.local_steps=1")
OWN = """
import warnings
import numpy as np
import dpfed
features = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
labels = (features[:, 0] > 0).astype(int)
train = {"features": features[:60], "label": labels[:60]}
test = {"features": features[60:], "label": labels[60:]}
dpfed.fine_tune("linear", train, test, clients=2, settings={"run.rounds": 1}, out="run")
warnings.warn("mine", FutureWarning)
"""


def stderr_of(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_run_and_its_export_print_no_warning_of_a_library(tmp_path: Path) -> None:
    said = stderr_of("-m", "dpfed", "run", *SMALL, "--out", "run", cwd=tmp_path)
    said += stderr_of("-m", "dpfed", "export", "run", "adapter", cwd=tmp_path)
    assert "round 1/1" in said
    assert "Warning" not in said


def test_warnings_of_the_user_are_still_shown(tmp_path: Path) -> None:
    said = stderr_of("-c", OWN, cwd=tmp_path)
    assert "FutureWarning: mine" in said

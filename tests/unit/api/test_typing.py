"""A type checker reads the interface as an editor does: names, keywords, values and results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
SCRIPT = """
import dpfed

trained = dpfed.fine_tune("linear", {}, {}, clients=3, lr=0.1, task="regress", metric="mae")
reveal_type(trained)
reveal_type(trained.privacy)
reveal_type(dpfed.plan(100, 4.0, clients=3))
reveal_type(dpfed.tune("linear", {}, {}, space={"lr": [0.1]}, out="x"))
reveal_type(dpfed.load("run").predict_proba([[1.0]]))
dpfed.fine_tune("linear", {}, {}, clents=3)
dpfed.fine_tune("linear", {}, {}, task="regression")
dpfed.fine_tun
"""
FINDINGS = [
    'Revealed type is "dpfed.api.trained_model.TrainedModel"',
    'Revealed type is "dpfed.report.statement.build.Statement"',
    'Revealed type is "dpfed.privacy.planning.federation.FederationPlan"',
    'Revealed type is "dpfed.api.tuning.Tuning"',
    'Revealed type is "numpy.ndarray',
    'Unexpected keyword argument "clents" for "fine_tune"; did you mean "clients"?',
    'Argument "task" to "fine_tune" has incompatible type "Literal[\'regression\']"',
    'Module has no attribute "fine_tun"; maybe "fine_tune"?',
]


def test_a_type_checker_knows_the_interface(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--follow-imports=silent", "--ignore-missing-imports", "--no-error-summary"]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), script],
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    lines = [line for line in found.stdout.splitlines() if "defined in" not in line]
    assert len(lines) == len(FINDINGS), found.stdout + found.stderr
    for line, finding in zip(lines, FINDINGS, strict=True):
        assert finding in line
    assert (SOURCE / "dpfed" / "py.typed").is_file()

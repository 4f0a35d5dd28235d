"""`dpfed compare` as a person meets it: a real small study, killed and started again, and mistakes in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpfed.cli.main import main

KEYS = "model.name=linear run.rounds=2 run.local_steps=1 run.participation=0.5 privacy.batch=32 privacy.sigma=2"
QUICK = [word for key in KEYS.split() for word in ("--set", key)]
SMALL = ["--algorithms", "dp-fedavg,dp-fedadamw", "--lr", "dp-fedavg=0.3,3", "--lr", "dp-fedadamw=0.003,0.03"]
TABLES = ("table.csv", "table.json", "table.md", "table.tex", "search.csv", "curves.svg")


def dpfed(*args: str) -> int:
    old = sys.argv
    sys.argv = ["dpfed", *args]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = old
    return 0


def launch(out: Path) -> subprocess.Popen[str]:
    code = "from dpfed.cli.main import main; main()"
    args = [sys.executable, "-c", code, "compare", *QUICK, *SMALL, "--seeds", "2", "--out", str(out), "--json"]
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(out: Path) -> int:
    return sum('"finished"' in path.read_text() for path in out.glob("runs/*/run.json"))


def test_killed_and_started_again_it_ends_with_the_same_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = launch(killed)
    while process.poll() is None and finished(killed) < 3:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (killed / "table.csv").exists(), "it was killed in the middle"
    assert dpfed("compare", *QUICK, *SMALL, "--seeds", "2", "--out", str(killed), "--json") == 0
    printed = capsys.readouterr()
    assert "(was done)" in printed.err
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert [row["method"] for row in result["rows"]] == ["dp-fedavg", "dp-fedadamw"]
    assert result["out"] == str(killed)
    calm = launch(whole)
    out, err = calm.communicate(timeout=120)
    assert calm.returncode == 0, err
    assert "Loading" not in err, "workers print nothing"
    for name in TABLES:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert len({row["tuning_runs"] for row in rows}) == 1
    assert all(len(row["accuracies"]) == 2 and row["epsilon"]["server_worst"] > 0 for row in rows)
    assert "epsilon excludes tuning" in out
    assert len(list(killed.glob("runs/*/model.safetensors"))) == 4, "those of the reported runs"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--algorithms", "dp-fedavgg"], "did you mean dp-fedavg"),
        (["--preset", "sigmas"], "did you mean sigma"),
        (["--preset", "gamma", "--algorithms", "dp-fedavg"], "leave out --algorithms"),
        (["--lr", "dp-fedavg=a"], "NAME=v1,v2"),
        (["--algorithms", "dp-fedadamw", "--lr", "dp-fedavg=1"], "not among the arms"),
        (["--set", "run.noise=os"], "run.noise"),
        (["--seeds", "0"], "at least 1"),
        (["--algorithms", "dp-fedadamw:gamma=7"], "algorithm.gamma = 7"),
        (["nowhere.toml"], "there is no configuration"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert dpfed("compare", *QUICK, *args, "--out", str(tmp_path / "s")) == 2
    err = capsys.readouterr().err.strip()
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "s").exists()

"""`dpfed compare`: a small study that is killed and resumed, and mistakes in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from command import dpfed

from dpfed.cli.compare import study_of
from dpfed.registry import registry
from dpfed.studies.outcomes import Task
from dpfed.studies.output import write
from dpfed.studies.pool import run_one, run_pack
from dpfed.studies.study import conduct
from dpfed.training.job.job_cache import JobCache

KEYS = (
    "model.name=linear run.rounds=2 run.local_steps=1 run.participation=0.5 "
    "privacy.batch=32 privacy.sigma=2"
)
QUICK = [word for key in KEYS.split() for word in ("--set", key)]
SMALL = [
    "--algorithms",
    "dp-fedavg,dp-fedadamw",
    "--lr",
    "dp-fedavg=0.3,3",
    "--lr",
    "dp-fedadamw=0.003,0.03",
]
TABLES = ("table.csv", "table.json", "table.md", "table.tex", "search.csv", "curves.svg")


def command(out: Path) -> list[str]:
    return ["compare", *QUICK, *SMALL, "--seeds", "2", "--out", str(out), "--json"]


def killed_after(runs: int, out: Path) -> None:
    code = "from dpfed.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.poll() is None and finished(out) < runs:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def finished(out: Path) -> int:
    return sum('"finished"' in path.read_text() for path in out.glob("runs/*/run.json"))


class Inline:
    """One run after the other in this process: what the workers must agree with."""

    def __init__(self) -> None:
        self._ended: list[tuple[str, str | None]] = []

    def free(self) -> bool:
        return not self._ended

    def start(self, task: Task, folder: Path) -> None:
        self._ended.append((task.key, run_one(task.tables, folder, task.tuning, {})))

    def wait(self) -> tuple[str, str | None]:
        return self._ended.pop()


def test_killed_and_started_again_it_ends_with_the_same_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    killed_after(3, out)
    assert not (out / "table.csv").exists(), "it was killed in the middle"
    assert dpfed(*command(out), "--workers", "1") == 0
    printed = capfd.readouterr()
    assert printed.err.count("(was done)") >= 3
    assert "Loading" not in printed.err, "workers print nothing"
    assert "epsilon excludes tuning" in printed.out
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert result["out"] == str(out)
    assert [row["method"] for row in result["rows"]] == ["dp-fedavg", "dp-fedadamw"]
    assert len({row["tuning_runs"] for row in result["rows"]}) == 1
    assert all(
        len(row["accuracies"]) == 2 and row["epsilon"]["server_worst"] > 0 for row in result["rows"]
    )
    assert len(list(out.glob("runs/*/model.safetensors"))) == 4, "those of the reported runs"

    study = study_of("digits", KEYS.split(), SMALL[1], None, [SMALL[3], SMALL[5]], 2)
    whole.mkdir()
    write(study, conduct(study, whole, Inline(), registry()), whole)
    for name in TABLES:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


class Packing(Inline):
    """The pool of the command, in this process."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, workers: int, gpus: int) -> None:
        super().__init__()

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, *anything: object) -> None:
        pass

    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None:
        self.sizes.append(len(pack))
        given = [(task.key, task.tables, str(folder), task.tuning) for task, folder in pack]
        run_pack(given, {}, JobCache(), lambda key, answer: self._ended.append((key, answer)))


def test_a_packed_study_has_every_run_of_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "packed"
    monkeypatch.setattr("dpfed.studies.pool.Pool", Packing)
    monkeypatch.setattr("dpfed.studies.output.scores_over_rounds", lambda *anything: None)
    assert dpfed(*command(out), "--workers", "1", "--pack", "4") == 0
    assert Packing.sizes[0] == 4, "two methods, two rates"
    study = study_of("digits", KEYS.split(), SMALL[1], None, [SMALL[3], SMALL[5]], 2)
    results = conduct(study, tmp_path / "plain", Inline(), registry())
    rows = json.loads((out / "table.json").read_text())["rows"]
    for row, result in zip(rows, results, strict=True):
        assert row["accuracies"] == pytest.approx([o.accuracy for o in result.reported], abs=0.02)
        assert row["epsilon"].items() <= result.reported[0].epsilon.items()
    files = {
        p.relative_to(tmp_path / "plain")
        for p in (tmp_path / "plain" / "runs").rglob("*")
        if p.is_file()
    }
    assert {p.relative_to(out) for p in (out / "runs").rglob("*") if p.is_file()} == files


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
        (["--pack", "0"], "--pack 0 must be"),
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

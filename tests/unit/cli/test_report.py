"""`dpfed report` for runs and for studies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import dpfed

from dpfed.config import build, load, to_dict
from dpfed.registry import registry
from dpfed.report.page import body, read_report
from dpfed.studies.arms import parse_arms
from dpfed.studies.outcomes import Task
from dpfed.studies.output import write
from dpfed.studies.study import Study, claim, conduct
from dpfed.studies.study_reader import read_study
from dpfed.training.run import run

KEYS = (
    "model.name=linear run.rounds=2 run.local_steps=1 run.participation=0.5 "
    "privacy.batch=32 privacy.sigma=2"
)
QUICK = [word for key in KEYS.split() for word in ("--set", key)]


class InProcess:
    """Runs at once and here, where a study would start processes."""

    def __init__(self) -> None:
        self._done: list[str] = []

    def free(self) -> bool:
        return not self._done

    def start(self, task: Task, folder: Path) -> None:
        run(build(task.tables, registry()), folder)
        self._done.append(task.key)

    def wait(self) -> tuple[str, str | None]:
        return self._done.pop(), None


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "s"
    base = load("digits", KEYS.split(), registry())
    grids = dict.fromkeys(("dp-fedavg", "dp-fedsam"), (0.3,))
    arms = parse_arms("dp-fedavg,dp-fedsam", base, registry(), grids)
    asked = Study(to_dict(base), tuple(arms), 2, "linear on digits", extra=0, limit=1)
    with claim(out, asked, False):
        write(asked, conduct(asked, out, InProcess(), registry()), out)
    return out


def test_a_run_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "r")
    assert dpfed("run", *QUICK, "--out", run) == 0
    assert dpfed("report", run, "--json") == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert Path(said["out"]).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert said["megabytes"] < 6
    assert "labels" in said["figures"]
    assert dpfed("report", run, "--public", "--json") == 0
    shared = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert shared["out"] == f"{run}/public.html"
    assert not {"labels", "clients"} & set(shared["figures"])


def test_a_study_becomes_a_page(study: Path) -> None:
    table, groups = read_study(study, public=False)
    # Larger than the only value that the search begins with.
    larger = {"lr": 0.949}
    assert [(row.rates, row.tuning_runs) for row in table.rows] == [(larger, 2)] * 2
    assert [row.label for row in table.rows] == ["dp-fedavg", "dp-fedsam"]
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("dp-fedavg", 2),
        ("dp-fedsam", 2),
    ]
    records = json.loads((study / "table.json").read_text())["rows"]
    for record, row, group in zip(records, table.rows, groups, strict=True):
        assert row.mean == pytest.approx(record["accuracy"])
        assert sorted(group.accuracies) == sorted(row.scores)
    shown = body(read_report([study], read_study=read_study))
    # dp-fedsam releases each batch twice.
    assert "spends a larger epsilon than others" in shown
    assert "is in bold" not in shown, "one alone is compared with nobody"
    assert "<strong>dp-" not in shown
    assert "linear on digits" in shown


def test_a_study_without_its_runs_has_its_table(study: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("study.json", "table.json"):
        (alone / name).write_bytes((study / name).read_bytes())
    assert "dp-fedsam" in body(read_report([alone], read_study=read_study))
    (alone / "table.json").write_text("{}")
    assert dpfed("report", str(alone)) == 2
    (alone / "table.json").unlink()
    assert dpfed("report", str(alone)) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "neither the folder of a run nor of a study"),
        (["nowhere", "--watch", "--json"], "--watch serves the page and writes none"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpfed("report", *words) == 2
    assert said in capsys.readouterr().err

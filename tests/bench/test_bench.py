"""The benchmark: every way runs, a peer that cannot is a result, and ratios are what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dpfed.bench.cases import CPU, Case
from dpfed.bench.run import Comparison, Measured, compare, measure
from dpfed.cli.bench import lines
from dpfed.cli.main import main

torch.set_num_threads(1)
CASE = next(case for case in CPU if case.model == "glyph-vit")
TINY = Case(CASE.model, CASE.spec, clients=2, batch=2, rank=2)


def test_every_way_runs_on_a_cpu() -> None:
    found = compare(TINY, torch.device("cpu"), repeats=1, warm=1)
    assert [way.way for way in found.ways] == ["union", "private", "private, 8 slots", "one by one", "opacus"]
    assert [way.failed for way in found.ways] == [None] * 5
    assert all(way.milliseconds > 0 for way in found.ways)  # type: ignore[operator]


def test_ratios() -> None:
    found = Comparison(
        "m", 5, 16, (Measured("union", 10.0), Measured("private", 12.0), Measured("x", None, failed="no"))
    )
    assert found.ratio("private", "union") == pytest.approx(1.2)
    assert found.ratio("x", "union") is None
    assert found.ratio("y", "union") is None
    shown = "\n".join(lines(found))
    assert "0.83 x the private step" in shown
    assert "-  no" in shown


def test_a_peer_that_fails_or_is_missing_is_a_result() -> None:
    def fails() -> None:
        raise ValueError("this model is not supported\nsecond line")

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'opacus'", name="opacus")

    device = torch.device("cpu")
    assert measure("a", fails, device, 1, 1).failed == "ValueError: this model is not supported"  # type: ignore[arg-type]
    assert measure("b", missing, device, 1, 1).failed == "not installed: pip install opacus"  # type: ignore[arg-type]


def test_the_command_writes_json_and_refuses_unknown_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dpfed", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    monkeypatch.setattr("dpfed.bench.cases.CPU", (TINY,))
    assert run("bench", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path / "b.json"), "--json") == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "b.json").read_text()) == printed
    assert printed["cases"][0]["case"] == "glyph-vit"
    assert run("bench", "--device", "cpu", "--case", "vit-huge") == 2
    assert "choose from glyph-vit" in capsys.readouterr().err

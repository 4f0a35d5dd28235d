"""The benchmark: every way runs, a failed competitor is a result, ratios are correct."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dpfed.bench.cases import CPU, Case
from dpfed.bench.run import Comparison, Measured, compare, measure, measure_in_turn
from dpfed.bench.steps import Step
from dpfed.cli.bench import lines
from dpfed.cli.main import main

torch.set_num_threads(1)
CASE = next(case for case in CPU if case.model == "glyph-vit")
INSTALL_OPACUS = "not installed: pip install 'opacus>=1.6,<1.7'"
TINY = Case(CASE.model, CASE.spec, clients=2, batch=2, rank=2)


def test_every_way_runs_on_a_cpu() -> None:
    found = compare(TINY, torch.device("cpu"), repeats=1, warm=1)
    assert [way.way for way in found.ways] == [
        "union",
        "private",
        "private, 8 slots",
        "one by one",
        "opacus",
    ]
    assert [way.failed for way in found.ways] == [None] * 5
    assert all(way.milliseconds > 0 for way in found.ways)  # type: ignore[operator]


def test_ratios() -> None:
    found = Comparison(
        "m",
        5,
        16,
        (Measured("union", 10.0), Measured("private", 12.0), Measured("x", None, failed="no")),
    )
    assert found.ratio("private", "union") == pytest.approx(1.2)
    assert found.ratio("x", "union") is None
    assert found.ratio("y", "union") is None
    assert found.processor_ratio("private", "union") is None
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
    assert measure("b", missing, device, 1, 1).failed == INSTALL_OPACUS  # type: ignore[arg-type]


def test_on_a_cpu_the_ways_take_turns_and_the_order_rotates() -> None:
    seen: list[str] = []

    def way(name: str) -> tuple[str, Callable[[], Step]]:
        return name, lambda: lambda: seen.append(name)

    def missing() -> Step:
        raise ModuleNotFoundError("No module named 'opacus.optimizers'", name="opacus.optimizers")

    found = measure_in_turn([way("a"), ("x", missing), way("b")], repeats=3, warm=1)
    assert "".join(seen) == "a" + "b" + "ab" + "ba" + "ab"
    assert [m.way for m in found] == ["a", "x", "b"]
    assert [m.failed for m in found] == [None, INSTALL_OPACUS, None]
    assert all(m.processor is not None and m.peak is None for m in found if not m.failed)


def test_the_median_of_single_steps_counts() -> None:
    def slow() -> None:
        time.sleep(0.02 if len(calls) == 2 else 0.0)
        calls.append(None)

    calls: list[None] = []
    idle, busy = measure_in_turn(
        [("idle", lambda: slow), ("busy", lambda: burn)], repeats=3, warm=0
    )
    assert idle.milliseconds is not None
    assert busy.processor is not None
    assert idle.milliseconds < 15, "the one slow step of three is not the median"
    assert busy.processor > 4


def burn() -> None:
    end = time.process_time() + 0.005
    while time.process_time() < end:
        pass


def test_the_command_writes_json_and_refuses_unknown_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dpfed", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    monkeypatch.setattr("dpfed.bench.cases.CPU", (TINY,))
    assert (
        run(
            "bench",
            "--device",
            "cpu",
            "--repeats",
            "1",
            "--out",
            str(tmp_path / "b.json"),
            "--json",
        )
        == 0
    )
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "b.json").read_text()) == printed
    (case,) = printed["cases"]
    assert case["case"] == "glyph-vit"
    times = {way["way"]: way["milliseconds"] for way in case["ways"]}
    assert case["times_private"]["opacus"]["clock"] == pytest.approx(
        times["opacus"] / times["private"]
    )
    assert printed["versions"]["opacus"].startswith("1.6")
    assert "benchmarks/peers/run.py" in printed["others"]
    assert run("bench", "--device", "cpu", "--case", "vit-huge") == 2
    assert "choose from glyph-vit" in capsys.readouterr().err

"""The comparison with peers: equal models, rounds in turn, correct ratios, named failures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    return script("run")


@pytest.fixture(scope="module")
def common() -> ModuleType:
    return script("common")


TOOL = """
import json, sys
name, log, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
for t in range(rounds):
    print(json.dumps({"ready": t}), flush=True)
    sys.stdin.readline()
    open(log, "a").write(name)
    if name == "x":
        sys.exit("this cannot be done")
print(json.dumps({"tool": name, "seconds": 1.0}), flush=True)
"""


def test_rounds_are_computed_in_turn_and_failures_are_reported(
    driver: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    log = tmp_path / "log"
    commands = {
        name: [sys.executable, str(tmp_path / "tool.py"), name, str(log), "3"] for name in "axb"
    }
    found = driver.measure(commands, 3)
    # x fails in its first round. The first tool changes each turn: a, (x) b, b.
    assert log.read_text() == "axb" + "ba" + "ba"
    assert [found[name].failed for name in "axb"] == [None, "this cannot be done", None]
    assert found["a"].result == {"tool": "a", "seconds": 1.0}
    assert found["x"].result is None


def test_ratios_are_of_medians_and_within_turns(driver: ModuleType) -> None:
    mine = {
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "each": [[1, 1], [2, 1], [4, 2]],
        "does": "m",
        "versions": {"dpfed": "1"},
    }
    other = {
        "seconds": 6.0,
        "cpu_seconds": 5.0,
        "each": [[6, 5], [6, 4], [8, 5]],
        "does": "o",
        "versions": {"pfl": "2"},
    }
    assert driver.ratios(mine, other, 0) == (3.0, 2.0, 6.0)
    assert driver.ratios(mine, other, 1) == (5.0, 2.5, 5.0)
    lines = driver.table({"dpfed": mine, "pfl": other}, {"flower": "no ray"})
    assert "| pfl 2 | 3.00 (2.00 to 6.00) | 5.00 (2.50 to 5.00) | o |" in lines
    assert "| flower | - | - | no ray |" in lines
    assert lines[-1] == "dpfed 1, pfl 2"


def test_a_missing_environment_is_refused(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--venv", "pfl=nowhere"])
    with pytest.raises(SystemExit) as stop:
        driver.parsed()
    assert stop.value.code == 2
    assert "opacus, flower, pfl" in capsys.readouterr().err


def test_peers_that_are_missing_are_named_with_their_commands(
    driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    line = {
        "tool": "dpfed",
        "versions": {"dpfed": "1"},
        "does": "all",
        "seconds": 1.0,
        "cpu_seconds": 1.0,
        "each": [[1.0, 1.0]],
        "parameters": 5,
    }
    monkeypatch.setattr(
        driver, "measure", lambda *_: {"dpfed": argparse.Namespace(result=line, failed=None)}
    )
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "f.json")])
    driver.main()
    printed = capsys.readouterr().out
    for peer, package in (
        ("opacus", "opacus>=1.6"),
        ("flower", "flwr[simulation]>=1.41"),
        ("pfl", "dp-accounting<0.6"),
    ):
        assert f".venvs/{peer}/bin/pip install " in printed
        assert package in printed
    assert json.loads((tmp_path / "f.json").read_text())["tools"] == {"dpfed": line}


def test_peers_train_the_model_of_the_default_run_and_hold_as_many_records(
    common: ModuleType,
) -> None:
    from dpfed.config import load
    from dpfed.registry import registry
    from dpfed.training.job.job import prepare

    job = prepare(load("digits", ("run.device=cpu", "privacy.sigma=1"), registry()))
    at = common.digits()
    assert {name: tuple(p.shape) for name, p in at.trained.items()} == dict(
        zip(job.space.names, map(tuple, job.space.shapes), strict=True)
    )
    assert at.parameters == job.space.size
    assert [len(labels) for _, labels in at.clients] == job.plan.sizes.tolist()


def test_processor_time_of_children_counts_while_they_live(common: ModuleType) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("no /proc here")
    before = common.children_seconds()
    code = (
        "import sys, time\n"
        "while time.process_time() < 0.2: pass\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    alive = common.children_seconds() - before
    child.communicate()
    assert 0.15 < alive < 1
    assert common.children_seconds() - before == pytest.approx(alive, abs=0.1)


def test_warm_rounds_are_not_counted_and_stdout_holds_one_line(common: ModuleType) -> None:
    code = (
        "import argparse, common\n"
        "r = common.Rounds(argparse.Namespace(in_turn=False, warm=1, rounds=2))\n"
        "print('noise of a library')\n"
        "for _ in range(4): r.tick()\n"
        "r.end('t', (), 'd', 7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PEERS, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    said = json.loads(line)
    assert (said["rounds"], len(said["each"]), said["parameters"]) == (2, 2, 7)
    assert "noise of a library" in done.stderr

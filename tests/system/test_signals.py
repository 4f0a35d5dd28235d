"""Real signals stop a run between local steps; it resumes with identical results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from command import dpfed
from safetensors.torch import load_file
from torch import equal

from dpfed.errors import InterruptedRunError
from dpfed.training.interrupt import on_signals

KEYS = (
    "model.name=linear run.rounds=6 run.local_steps=3 run.participation=0.3 "
    "privacy.batch=16 privacy.sigma=2"
)
QUICK = [word for key in KEYS.split() for word in ("--set", key)]

# Each run pauses in the second local step of round 3 until the signal has arrived, so the moment
# does not depend on the machine's speed. One process forks all runs, so torch is imported once.
CHILD = """
import json, os, signal, sys, time
from dpfed.cli import main
from dpfed.algorithms.dp_fedadamw import DPFedAdamW
step = DPFedAdamW.step
def slow(self, ctx, local, oracle, k):
    if k.is_meta:
        return step(self, ctx, local, oracle, k)
    if (int(ctx.t), int(k)) == (3, 2):
        for _ in signals:
            os.kill(os.getpid(), signal.SIGSTOP)
            # Another thread may receive the signal; give the main thread time to notice it.
            time.sleep(0.2)
    print("step", int(ctx.t), int(k), file=sys.stderr, flush=True)
    return step(self, ctx, local, oracle, k)
DPFedAdamW.step = slow
for out, signals in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        sys.argv = ["dpfed", "run", *json.loads(sys.argv[2]), "--out", out]
        handle = os.open(out + ".err", os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 2)
        main.main()
    for number in signals:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            sys.exit(f"{out} ended with {status}")
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
SENT = {"term": [signal.SIGTERM], "int": [signal.SIGINT], "twice": [signal.SIGINT, signal.SIGINT]}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, list[str]]]:
    """Return the folder, the exit code and the lines of stderr of each run."""
    folder = tmp_path_factory.mktemp("stopped")
    jobs = json.dumps([(str(folder / name), signals) for name, signals in SENT.items()])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHILD, jobs, json.dumps(QUICK)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    codes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return {
        name: (folder / name, code, (folder / f"{name}.err").read_text().splitlines())
        for name, code in zip(SENT, codes, strict=True)
    }


@pytest.mark.parametrize(
    ("name", "signal_name", "code"), [("term", "SIGTERM", 143), ("int", "SIGINT", 130)]
)
def test_a_signal_stops_after_the_local_step_and_the_run_goes_on(
    name: str, signal_name: str, code: int, stopped: Any, tmp_path: Path
) -> None:
    out, returned, err = stopped[name]
    assert returned == code
    stopped_by = f"dpfed: stopped by {signal_name} after round 2"
    assert err[-1] == f"{stopped_by}; go on with `dpfed run --resume {out}`."
    # The run finished this step and began no other.
    assert [line for line in err if line.startswith("step")][-1] == "step 3 2"
    assert "Traceback" not in "\n".join(err)
    assert json.loads((out / "run.json").read_text())["state"] == "interrupted"
    assert not list(out.rglob("*.part"))
    assert {p.stem for p in (out / "checkpoint").glob("*.json")} == {"round-1", "round-2"}
    assert dpfed("run", "--resume", str(out)) == 0
    assert dpfed("run", *QUICK, "--out", str(tmp_path / "whole")) == 0
    a, b = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole"))
    assert all(equal(a[name], b[name]) for name in a)


def test_a_second_ctrl_c_ends_at_once(stopped: Any) -> None:
    out, returned, err = stopped["twice"]
    assert returned == 130
    assert "step 3 1" in err
    assert "step 3 2" not in err
    assert "Traceback" not in "\n".join(err)
    assert json.loads((out / "run.json").read_text())["state"] == "running"


def test_signals_are_noted_only_once_training_has_begun_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as end, on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 143
    with on_signals() as stop:
        stop.gently = True
        stop()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRunError) as caught:
            stop()
        assert caught.value.code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_in_another_thread_signals_are_left_alone() -> None:
    seen = []

    def look() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with on_signals() as stop:
            stop()
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [True]

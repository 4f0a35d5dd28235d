"""Several processes compute one run; a lost process ends it with a sentence and a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import callback_case
import numpy as np
import pytest
import torch
from callback_case import Watcher
from safetensors.torch import load_file

from dpfed.cli.main import main
from dpfed.config import Config, build, to_toml
from dpfed.errors import DpfedError
from dpfed.privacy import plan
from dpfed.privacy.accounting.calibrate import calibrate_sigma
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.registry import registry
from dpfed.training.backends import torchrun
from dpfed.training.backends.torchrun import join, packed, unpacked, words_of
from dpfed.training.job.job import Job
from dpfed.training.job.plan import plan_of
from dpfed.training.rounds import Round
from dpfed.training.run import run
from dpfed.training.run_folder.resume import fixed_settings

pytestmark = pytest.mark.timeout(1000)
ROUNDS = 3
# Seconds until a hanging process fails the test.
HANG = 900
CASES: dict[str, dict[str, dict[str, Any]]] = {
    # The processes compute 3 and 2 clients.
    "fedadamw": {"algorithm": {"name": "dp-fedadamw", "lr": 0.05}, "run": {"participation": 0.5}},
    "scaffold": {
        "algorithm": {"name": "dp-scaffold", "lr": 0.3},
        "run": {"participation": 0.5, "cohort_choice": "balanced"},
    },
    "quantile": {
        "algorithm": {"name": "dp-fedavg", "lr": 0.3},
        "privacy": {"clip_mode": "quantile"},
        "run": {"average": 0.5},
    },
    # The cohort has one client, so rank 1 is idle.
    "one": {"algorithm": {"name": "dp-fedavg", "lr": 0.3}, "run": {"participation": 0.1}},
    "weights": {
        "data": {"partition": "dirichlet_classwise", "alpha": 5.0},
        "algorithm": {"name": "dp-scaffold", "lr": 0.3, "agg_weights": "size"},
        "run": {"participation": 0.7, "memory_limit": 1},
    },
}

SECRET: dict[str, dict[str, Any]] = {
    "model": {"liveness": True},
    "run": {"noise": "os", "rounds": 2},
}


def config_of(**sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "clients": 10, "partition": "iid"},
        "model": {"name": "linear", "liveness": False},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.05},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {
            "rounds": ROUNDS,
            "local_steps": 2,
            "participation": 0.5,
            "device": "cpu",
            "timeout": HANG,
        },
    }
    tables = {name: {**table, **sections.get(name, {})} for name, table in raw.items()}
    given = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }
    return build(given, registry())


TARGET: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "dp-fedavg", "lr": 0.3},
    "privacy": {"sigma": None, "target_epsilon": 2.0},
    "run": {"rounds": 2},
}


class CrashError(Exception):
    """A simulated kill of the process."""


def begin_with_other_noise(config: Config, out: Path) -> None:
    """Crash after round 1 of a run whose calibration differs from today's by 1e-5."""

    def crash(round: Round) -> None:
        if round.t == 1:
            raise CrashError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "calibrate_sigma", lambda *plan: (1 + 1e-5) * calibrate_sigma(*plan))
        with pytest.raises(CrashError):
            run(config, out, callbacks=[Watcher(on_round=crash)])


def write_received_noise(path: Path) -> None:
    """Make this process write the multipliers that it receives first from rank 0."""
    received = torchrun.with_received_noise

    def written(job: Job, group: torchrun.Group) -> Job:
        job = received(job, group)
        if not path.exists():
            path.write_text(json.dumps(job.plan.multipliers.tolist()))
        return job

    torchrun.with_received_noise = written


# The program of each process: it runs all cases, so that processes start only once.
RANK = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1].split(os.pathsep)
import test_torchrun as here
import torch.distributed
from dpfed.training.backends.torchrun import Group
from dpfed.training.backends.execution import Torchrun
from dpfed.training.backends.fleet import Fleet
from dpfed.training.run import assist, run
from dpfed.errors import DpfedError, StoppedError
rank, out = int(sys.argv[2]), Path(sys.argv[3])
os.environ["RANK"] = str(rank)
for name, sections in {**here.CASES, "secret": here.SECRET}.items():
    config = here.config_of(**sections)
    group = Group(rank, 2, here.HANG, init=f"file://{out}/meet-{name}")
    if rank == 0:
        run(config, out / name, execution=Torchrun(group))
    else:
        assist(config, group)
    group.close()
# Rank 0 resumes a run whose recorded noise differs from the noise that both calibrate.
config = here.config_of(**here.TARGET)
group = Group(rank, 2, here.HANG, init=f"file://{out}/meet-target")
if rank == 0:
    here.begin_with_other_noise(config, out / "target")
    run(config, out / "target", "resume", execution=Torchrun(group))
else:
    here.write_received_noise(out / "target-1.json")
    assist(config, group)
group.close()
group = Group(rank, 2, here.HANG, init=f"file://{out}/meet-other")
try:
    config = here.config_of(run={"seed": rank})
    run(config, out / "other", execution=Torchrun(group)) if rank == 0 else assist(config, group)
except DpfedError as error:
    (out / f"other-{rank}.txt").write_text(str(error))
    torch.distributed.destroy_process_group()
group = Group(rank, 2, here.HANG, init=f"file://{out}/meet-killed")
config = here.config_of(**here.CASES["scaffold"])
if rank == 1:
    right = Fleet.run_cohort
    Fleet.run_cohort = lambda self, t, *rest, **more: (
        os.kill(os.getpid(), 9) if t == 3 else right(self, t, *rest, **more)
    )
    assist(config, group)
try:
    run(config, out / "killed", execution=Torchrun(group))
except StoppedError as error:
    (out / "killed.txt").write_text(str(error))
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the runs of two processes."""
    out = tmp_path_factory.mktemp("together")
    # The test's own folder and that of the shared helpers.
    here = os.pathsep.join([str(Path(__file__).parent), str(Path(callback_case.__file__).parent)])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, here, str(r), str(out)], stderr=subprocess.PIPE, text=True
        )
        for r in (0, 1)
    ]
    said = [process.communicate(timeout=HANG)[1] for process in both]
    assert [process.returncode for process in both] == [0, -signal.SIGKILL], said
    return out


@pytest.mark.parametrize("case", CASES)
def test_two_processes_compute_the_run_of_one(case: str, together: Path, tmp_path: Path) -> None:
    alone = run(config_of(**CASES[case]), tmp_path / "alone")
    found = json.loads((together / case / "run.json").read_text())
    assert found["state"] == "finished"
    assert found["epsilon"] == alone["epsilon"]
    one, two = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "alone", together / case)
    )
    assert all(float((one[k] - two[k]).abs().max()) < 1e-5 for k in one)
    rows = [
        [json.loads(line)["clip"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "alone", together / case)
    ]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    assert (len(set(rows[0])) > 1) == (case == "quantile")


@pytest.mark.parametrize("case", ["scaffold", "weights"])
def test_the_checkpoint_has_the_memory_of_every_client(
    case: str, together: Path, tmp_path: Path
) -> None:
    """The vectors equal those of a run in one process."""
    run(config_of(**CASES[case]), tmp_path / "alone")
    folders = [folder / "checkpoint" for folder in (tmp_path / "alone", together / case)]
    one, two = (json.loads((folder / f"round-{ROUNDS}.json").read_text()) for folder in folders)
    assert one["taken"] == two["taken"]
    assert one["memory"].keys() == two["memory"].keys() == one["taken"].keys()
    for client, (file, _) in one["memory"].items():
        assert two["memory"][client][0] == file
        a, b = (np.load(folder / "memory" / file) for folder in folders)
        assert np.abs(a).max() > 0
        assert np.abs(a - b).max() < 1e-5


def test_each_process_draws_real_noise_for_its_own_clients(
    together: Path,
) -> None:
    """Only rank 0 draws cohorts and charges, so the processes need no common random numbers."""
    found = json.loads((together / "secret" / "run.json").read_text())
    assert found["state"] == "finished"
    assert found["release"].startswith("the model may be released")
    with Ledger.open(together / "secret" / "ledger.sqlite", readonly=True) as ledger:
        rows = list(ledger.rows())
    assert [sum(row.charge.round == t for row in rows) for t in (1, 2)] == [5, 5]
    assert {row.charge.noise for row in rows} == {"os"}


def test_all_processes_add_the_noise_that_the_ledger_records(together: Path) -> None:
    with Ledger.open(together / "target" / "ledger.sqlite", readonly=True) as ledger:
        ((_, recorded),) = ledger.meta["kinds"]
        charged = {row.charge.mechanism.noise_multiplier for row in ledger.rows()}
    received = json.loads((together / "target-1.json").read_text())
    assert charged == set(received) == {recorded}
    today, _ = plan_of(config_of(**TARGET))
    assert today.multipliers[0] == pytest.approx(recorded / (1 + 1e-5), rel=1e-12)


def test_processes_with_different_jobs_are_refused_before_anything_is_written(
    together: Path,
) -> None:
    for rank in (0, 1):
        assert "different settings" in (together / f"other-{rank}.txt").read_text()
    assert not (together / "other").exists()


# --- lost processes ---


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# Process 1 stops itself in round 3 after it has made the file `frozen`. Process 0 waits for that
# file and then sets a short timeout, so the result does not depend on speed.
FREEZING = """
import datetime, os, signal, sys, time
from pathlib import Path
from dpfed.cli.main import main
from dpfed.training.backends import torchrun as distributed
from dpfed.training.backends.fleet import Fleet
where, frozen = sys.argv.pop(1), Path(sys.argv.pop(1))
leads = os.environ["RANK"] == "0"
def stop():
    frozen.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
def wait():
    while not frozen.exists():
        time.sleep(0.05)
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout
    soon = datetime.timedelta(seconds=1)
    for group in (None, groups[0]._control):
        _set_pg_timeout(soon, group)
    # A single receive keeps the timeout that its group was made with.
    dist.recv = lambda rows, source: dist.irecv(rows, source).wait(soon)
groups = []
made = distributed.Group.__init__
def make(self, *given):
    made(self, *given)
    groups.append(self)
distributed.Group.__init__ = make
def before(owner, name, is_now):
    right = getattr(owner, name)
    def call(*given, **more):
        if is_now(*given, **more):
            wait() if leads else stop()
        return right(*given, **more)
    setattr(owner, name, call)
calls = iter(range(100))
third = lambda *given: next(calls) == 2
if where == "beginning":
    if leads:
        before(distributed.Distributed, "_together", lambda self, t, *rest: t == 3)
    else:
        before(distributed, "_follow_round", lambda *given: given[4][0] == 3)
elif where == "computing":
    before(Fleet, "run_cohort", lambda self, t, *rest, **more: t == 3)
elif where == "summing":
    before(distributed.Group, "total", third)
else:
    before(distributed.Group, "receive" if leads else "send", third)
sys.exit(main())
"""


def _start(rank: int, port: int, call: list[str]) -> subprocess.Popen[str]:
    where = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, *call],
        env={**os.environ, **where},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_with_a_killed_process_can_be_resumed(together: Path, tmp_path: Path) -> None:
    """The run stops with the state after round 2, and one process completes it."""
    assert "another process of the run was lost" in (together / "killed.txt").read_text()
    stopped = json.loads((together / "killed" / "run.json").read_text())
    assert (stopped["state"], stopped["rounds"]) == ("stopped", 2)
    run(config_of(**CASES["scaffold"]), together / "killed", mode="resume")
    alone = run(config_of(**CASES["scaffold"]), tmp_path / "alone")
    assert (
        json.loads((together / "killed" / "run.json").read_text())["epsilon"]["server_max"]
        == alone["epsilon"]["server_max"]
    )
    one, two = (
        load_file(folder / "model.safetensors")
        for folder in (together / "killed", tmp_path / "alone")
    )
    assert all(float((one[k] - two[k]).abs().max()) < 1e-5 for k in one)


@pytest.mark.parametrize("where", ["beginning", "computing", "summing", "remembering"])
def test_a_frozen_process_ends_the_run_with_exit_code_3(where: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = config_of(
        algorithm={"name": "dp-scaffold", "lr": 0.3}, run={"rounds": 30, "timeout": HANG}
    )
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    port, arguments = _free_port(), ["run", str(file), "--out", str(out)]
    call = ["-c", FREEZING, where, str(tmp_path / "frozen"), *arguments]
    both = [_start(rank, port, call) for rank in (0, 1)]
    try:
        _, said = both[0].communicate(timeout=HANG)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[0].returncode == 3, said
    last = [line for line in said.splitlines() if line.startswith("dpfed: ")]
    assert len(last) == 1
    assert f"was lost or took longer than run.timeout = {HANG} seconds" in last[0]
    assert "--resume" in last[0]
    assert "Traceback" not in said
    stopped = json.loads((out / "run.json").read_text())
    assert (stopped["state"], stopped["rounds"]) == ("stopped", 2)


# --- functions ---


def test_packing_is_bitwise_exact_for_every_dtype() -> None:
    tensors = {
        "a": torch.tensor([[1.5, float("nan")], [-0.0, 3e-42]]),
        "b": torch.tensor([True, False, True]),
        "c": torch.tensor(7.0, dtype=torch.float64),
        "d": torch.empty(0),
        "e": torch.tensor([2**62 + 1]),
    }
    back = unpacked(packed(tensors), tensors)
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert packed({"x": back[name]}).tolist() == packed({"x": value}).tolist()


def test_a_digest_fits_into_a_header() -> None:
    digest = "01" + "00" * 7 + "ff" * 8 + "00" * 16
    assert words_of(digest) == [1, -1, 0, 0]


def test_without_torchrun_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join(config_of()) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join(config_of()) is None


@pytest.mark.parametrize(
    ("sections", "environment", "sentence"),
    [
        ({}, {}, "start the run by torchrun"),
        ({"run": {"diagnostics": True}}, {"RANK": "0"}, "run.diagnostics"),
        ({"run": {"device": "cuda:1"}}, {"RANK": "0"}, "all processes on one GPU"),
        ({"run": {"timeout": 1}}, {"RANK": "0"}, "did not find one another in 1 seconds"),
    ],
)
def test_settings_that_exclude_several_processes_are_refused(
    sections: dict[str, Any],
    environment: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    if environment:
        environment = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(DpfedError, match=sentence):
        join(config_of(**sections))


def test_error_messages_name_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(sys, "argv", ["dpfed", "run", "no-such-file.toml"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("dpfed, process 3: there is no configuration")


def test_the_timeout_may_change_when_a_run_resumes() -> None:
    assert fixed_settings(config_of()) == fixed_settings(config_of(run={"timeout": 7}))

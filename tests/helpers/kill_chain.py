"""kill -9 at many moments: killed and resumed runs must end like an undisturbed run.

    python tests/helpers/kill_chain.py --kills 50 --lanes 2 --seed 0

A chain is one run that is started, killed and resumed until it may finish. Kills come during
start-up, by the clock, before the n-th access to a file of the folder, and before or after a
cohort is computed. Each link is `dpfed run` in a forked process, which saves importing torch.

With seeded noise, all files must be bitwise those of the reference, except for times. With real
noise, the ledger must list every cohort as often as it was started.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

from dpfed.cli.main import main as dpfed
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.recorded_spending import read_recorded_spending

# The memory of 11 clients is more than 1 MiB, so it moves to files.
FEATURES = 3000
CLASSES = 8
CLIENTS = 20
ROUNDS = 8
# Seconds for one link.
TIMEOUT = 120.0

COMMON = {
    "data.name": "npz",
    "data.clients": CLIENTS,
    "data.classes": CLASSES,
    "model.name": "linear",
    "privacy.sigma": 2.0,
    "privacy.batch": 4,
    "run.rounds": ROUNDS,
    "run.local_steps": 2,
    "run.participation": 0.4,
    "run.device": "cpu",
    "run.fleet_size": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "quantile": {"algorithm.name": "dp-fedadamw", "privacy.clip_mode": "quantile"},
    "memory": {"algorithm.name": "dp-scaffold", "algorithm.lr": 0.1, "run.memory_limit": 1},
    "os": {"algorithm.name": "dp-fedadamw", "run.noise": "os"},
    "rare": {
        "algorithm.name": "dp-scaffold",
        "algorithm.lr": 0.1,
        "run.memory_limit": 1,
        "run.checkpoint_every": 3,
    },
}


@dataclass(frozen=True)
class Usual:
    """Timing of an undisturbed run: seconds before and after it touched its folder, and touches."""

    start: float
    work: float
    files: int
    outcome: dict[str, Any]


Act = Callable[[str, int], None]
"""Called at each moment of a run with its kind, "file" or "cohort", and its number."""


class WrongError(Exception):
    """A chain ended in another state than the undisturbed run."""


def make_data(path: Path) -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, 460)
    x = (0.3 * centres[y] + rng.normal(size=(460, FEATURES)) / 4).astype(np.float32)
    np.savez(path, x_train=x[:400], y_train=y[:400], x_test=x[400:], y_test=y[400:])


def arguments(case: str, data: Path, out: Path) -> list[str]:
    """Return the command of a link: start the run, or resume it if it has a configuration."""
    if (out / "config.toml").exists():
        return ["run", "--resume", str(out), "--json"]
    keys = {**COMMON, "data.path": json.dumps(str(data)), **CASES[case]}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return ["run", "digits", *sets, "--out", str(out), "--json"]


def watch(out: Path, act: Act) -> None:
    """Call `act` before each access to a file of the folder, and at the ends of each cohort.

    A file outside the folder gets a line for every cohort that started.
    """
    files, cohorts = itertools.count(1), itertools.count(1)
    fsync, run_cohort, folder = os.fsync, Fleet.run_cohort, str(out)
    witness = os.open(out.with_suffix(".cohorts"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in (
            "open",
            "os.rename",
            "os.remove",
            "os.mkdir",
            "sqlite3.connect",
        ) and folder in str(args[0]):
            act("file", next(files))

    def synced(handle: int) -> None:
        act("file", next(files))
        fsync(handle)

    def witnessed(self: Fleet, t: int, state: Any, clients: Any, wait_for_charge: Any) -> Any:
        lines = []

        def released() -> None:
            wait_for_charge()
            # From here on noised values are released.
            if not lines:
                lines.append(os.write(witness, (json.dumps([t, list(clients)]) + "\n").encode()))

        act("cohort", next(cohorts))
        mean = run_cohort(self, t, state, clients, released)
        act("cohort", next(cohorts))
        return mean

    sys.addaudithook(hook)
    os.fsync = synced
    Fleet.run_cohort = witnessed  # type: ignore[method-assign]


def start(args: list[str], out: Path, log: Path, act: Act) -> int:
    """Fork a link and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        watch(out, act)
        sys.argv = ["dpfed", *args]
        dpfed()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit status, or None if the link is still running after the time."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.0005)


def whole(args: list[str], out: Path, log: Path, act: Act = lambda kind, n: None) -> None:
    """Run a link to its end."""
    pid = start(args, out, log, act)
    status = wait(pid, TIMEOUT)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if status != 0:
        raise WrongError(f"a link without a kill ended with {status}: {log.read_text()[-2000:]}")


def killed(args: list[str], out: Path, log: Path, rng: random.Random, usual: Usual) -> str | None:
    """Start a link and kill it; return its status, or None if it ended first."""
    how = rng.choices(["start", "clock", "file", "cohort"], [1, 2, 2, 1])[0]
    # A run that has completed some rounds is shorter: kill within the rest.
    at = rng.randint(1, int(0.6 * (2 * ROUNDS if how == "cohort" else usual.files)))
    delay = {"start": rng.uniform(0, usual.start), "clock": rng.uniform(0, usual.work * 0.6)}.get(
        how, TIMEOUT
    )
    read, write = os.pipe()

    def act(kind: str, n: int) -> None:
        if (kind, n) == ("file", 1):
            os.write(write, b"x")
        if (kind, n) == (how, at):
            os.kill(os.getpid(), signal.SIGKILL)

    pid = start(args, out, log, act)
    # Otherwise the read would not end with the link.
    os.close(write)
    if how == "clock":
        select.select([read], [], [], TIMEOUT)
    status = wait(pid, delay)
    os.close(read)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    if status == 0:
        return None
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return how
    raise WrongError(f"a resumed link ended with {status}: {log.read_text()[-2000:]}")


def outcome(out: Path) -> dict[str, Any]:
    """Return all that a run leaves except times, its random name and its path."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((out / "run.json").read_text())
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        ledger.verify()
        charges = [(row.seq, row.attempt, row.charge) for row in ledger.rows()]
    spent = read_recorded_spending(out)
    index = max(
        (out / "checkpoint").glob("round-*.json"), key=lambda p: int(p.stem.removeprefix("round-"))
    )
    kept = json.loads(index.read_text())
    return {
        "model": (out / "model.safetensors").read_bytes(),
        "metrics": [{k: v for k, v in line.items() if k != "seconds"} for line in lines],
        "result": {
            k: v for k, v in result.items() if k not in ("seconds", "out", "written", "run")
        },
        "charges": charges,
        "epsilon": (
            spent.server_worst,
            spent.server_max,
            spent.third_party,
            spent.epsilons.tolist(),
        ),
        "checkpoint": {k: v for k, v in kept.items() if k not in ("seconds", "sha256", "job")},
        "config": (out / "config.toml").read_text(),
    }


def compare(out: Path, wanted: dict[str, Any]) -> None:
    found = outcome(out)
    different = [key for key in wanted if found[key] != wanted[key]]
    if different:
        raise WrongError(f"{out}: {', '.join(different)} differ from the run that was not killed")


def at_least_released(out: Path) -> None:
    """Check that every cohort was charged before it started, and as often as it started."""
    lines = out.with_suffix(".cohorts").read_text().splitlines()
    released = Counter((t, tuple(clients)) for t, clients in map(json.loads, lines))
    cohorts: dict[tuple[int, int], list[int]] = {}
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        ledger.verify()
        for row in ledger.rows():
            cohorts.setdefault((row.txn, row.charge.round), []).append(int(row.charge.client))
    charged = Counter((t, tuple(sorted(clients))) for (_, t), clients in cohorts.items())
    missing = released - charged
    if missing:
        raise WrongError(f"{out}: released but not in the ledger: {dict(missing)}")
    result = json.loads((out / "run.json").read_text())
    spent = read_recorded_spending(out)
    if (
        abs(result["epsilon"]["server_max"] / spent.server_max - 1) > 1e-6
        or result["rounds"] != ROUNDS
    ):
        raise WrongError(
            f"{out}: the result says {result['epsilon']}, the ledger {spent.server_max}"
        )


def references(cases: list[str], data: Path, folder: Path) -> dict[str, Usual]:
    """Run each case once, undisturbed."""
    found = {}
    for case in cases:
        out, times = folder / f"reference-{case}", folder / f"{case}.times"
        handle = os.open(times, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        began = time.monotonic()

        def act(kind: str, n: int, handle: int = handle) -> None:
            if kind == "file":
                os.write(handle, f"{time.monotonic()}\n".encode())

        whole(arguments(case, data, out), out, folder / f"{case}.log", act)
        os.close(handle)
        at = [float(line) for line in times.read_text().split()]
        found[case] = Usual(at[0] - began, at[-1] - at[0], len(at), outcome(out))
    return found


def chains(
    lane: int, kills: int, seed: int, data: Path, folder: Path, known: dict[str, Usual]
) -> Iterator[dict[str, Any]]:
    """Run chains until the lane has made enough kills; print one line for each."""
    rng = random.Random(f"{seed}-{lane}")
    done = 0
    for number, case in enumerate(itertools.cycle(known)):
        if done >= kills:
            return
        out, log = (
            folder / f"lane{lane}-{number}-{case}",
            folder / f"lane{lane}-{number}-{case}.log",
        )
        want, hows, rounds = known[case], Counter(), []
        longest = rng.randint(3, 8)
        while done < kills and hows.total() < longest:
            how = killed(arguments(case, data, out), out, log, rng, want)
            if how is None:
                break
            done += 1
            hows[how] += 1
            metrics = out / "metrics.jsonl"
            rounds.append(len(metrics.read_text().splitlines()) - 1 if metrics.exists() else -1)
        else:
            whole(arguments(case, data, out), out, log)
        if case == "os":
            at_least_released(out)
        else:
            compare(out, want.outcome)
        yield {"case": case, "kills": hows.total(), **hows, "rounds": rounds}


def run_lane(
    lane: int, kills: int, seed: int, data: Path, folder: Path, known: dict[str, Usual]
) -> int:
    """Run a lane in its own process; its chains go to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / f"lane{lane}.jsonl").open("w") as file:
            for line in chains(lane, kills, seed, data, folder, known):
                file.write(json.dumps(line) + "\n")
                file.flush()
        code = 0
    except WrongError as error:
        print(f"lane {lane}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--folder", type=Path, help="keep everything here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_data(folder / "data.npz")
        try:
            known = references(given.cases.split(","), folder / "data.npz", folder)
        except WrongError as error:
            print(error, file=sys.stderr)
            return 1
        shares = [
            given.kills // given.lanes + (lane < given.kills % given.lanes)
            for lane in range(given.lanes)
        ]
        lanes = [
            run_lane(i, n, given.seed, folder / "data.npz", folder, known)
            for i, n in enumerate(shares)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in lanes]
        rows = [
            json.loads(line)
            for i in range(given.lanes)
            for line in (folder / f"lane{i}.jsonl").open()
        ]
    for row in rows:
        print(json.dumps(row))
    total = {
        key: sum(row.get(key, 0) for row in rows)
        for key in ("kills", "start", "clock", "file", "cohort")
    }
    seconds = round(time.monotonic() - began, 1)
    good = not any(codes) and total["kills"] == given.kills
    print(
        json.dumps(
            {"good": good, "chains": len(rows), **total, "seed": given.seed, "seconds": seconds}
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

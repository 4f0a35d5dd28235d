"""A long federation with kills, two clients that leave for good, and one that joins late.

Ten clients and the server are processes of `dpfed client` and `dpfed server` with TLS and keys. A
seed decides which processes are killed, and in which rounds.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w

pytest.importorskip("flwr")

from loopback_trial import Trial

from dpfed.config import build
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry
from dpfed.training.run import run

SEED = 27
CLIENTS = 10
ROUNDS = 30
COHORT = 3
CAP = 12
CLIENT_KILLS = 3
SERVER_KILLS = 2
DELTA = 1e-5
LEAVE = {"clinic-8": 6, "clinic-9": 14}
LATE = "clinic-7"
JOINS_IN = 8
# The late client's own budget is enough for three rounds, and it is asked more often.
LATE_ROUNDS = 3
# Seconds from the first process to the last round, far above an idle machine's.
LIMIT = 900.0
SIMULATED_SEEDS = 5


class Endurance:
    """The processes of the trial, and the kills that are still to come."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.clients: dict[str, subprocess.Popen[bytes]] = {}
        self.kills = planned_kills()
        self.started = time.monotonic()
        self.end = self.started + LIMIT
        for name in trial.names:
            if name != LATE:
                self.clients[name] = trial.client(name)
        self.server = trial.server()

    def run(self) -> None:
        """Cause each fault when its round is over, and wait for the end of the last round."""
        for t, victim in sorted(self.kills):
            self._wait_for_round(t)
            if victim == "server":
                self.server.send_signal(signal.SIGKILL)
                self.server.wait()
                self.server = self.trial.server("--resume")
            elif victim in LEAVE and t == LEAVE[victim]:
                self.clients[victim].terminate()
            elif victim == LATE:
                self.clients[LATE] = self.trial.client(LATE)
            else:
                self.clients[victim].kill()
                self.clients[victim].wait()
                self.clients[victim] = self.trial.client(victim)
        self.trial.wait(self.server, self.end - time.monotonic())

    def _wait_for_round(self, t: int) -> None:
        def over() -> bool:
            # A server that ended by itself ends the wait at once.
            if self.server.poll() is not None:
                self.trial.fail(f"the server ended with {self.server.returncode}", "server")
            return finished_round(self.trial) >= t

        self.trial.wait_for(f"the end of round {t}", over, self.end - time.monotonic())


def planned_kills() -> list[tuple[int, str]]:
    """Return pairs of a round and the process that a fault happens to after it."""
    rng = np.random.default_rng(SEED)
    steady = [f"clinic-{i}" for i in range(CLIENTS - 3)]
    victims = [*rng.choice(steady, CLIENT_KILLS, replace=False), *["server"] * SERVER_KILLS]
    rounds = rng.choice(np.arange(2, ROUNDS - 3), len(victims), replace=False)
    kills = [(int(t), str(victim)) for t, victim in zip(rounds, victims, strict=True)]
    return [*kills, *((t, name) for name, t in LEAVE.items()), (JOINS_IN, LATE)]


def finished_round(trial: Trial) -> int:
    path = trial.folder / "served" / "metrics.jsonl"
    with suppress(OSError, ValueError):
        return max(int(json.loads(line)["round"]) for line in path.read_text().splitlines())
    return -1


def late_budget(trial: Trial) -> float:
    """Return an epsilon between those of LATE_ROUNDS rounds and of one round more."""
    rate = trial.raw["privacy"]["batch"] / trial.raw["federation"]["clients"][LATE]
    step = Mechanism("poisson", rate, trial.raw["privacy"]["sigma"])
    steps = trial.raw["run"]["local_steps"]
    rounds = (LATE_ROUNDS, LATE_ROUNDS + 1)
    least, most = (epsilon([(step, n * steps)], DELTA) for n in rounds)
    return (least + most) / 2


def write_policies(trial: Trial) -> dict[str, float]:
    """Write each client's budget into its client.toml, and return the budgets by name."""
    budgets = dict.fromkeys(trial.names, 100.0) | {LATE: late_budget(trial)}
    for name, budget in budgets.items():
        path = trial.folder / name / "client.toml"
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        raw["policy"] |= {"max_epsilon": budget, "delta": DELTA, "max_rate": 0.5}
        path.write_text(tomli_w.dumps(raw), encoding="utf-8")
    return budgets


def check_ledgers(trial: Trial, budgets: dict[str, float]) -> None:
    """Check that each ledger is whole, within its cap and budget, and as the server knows it."""
    checkpoints = sorted(
        (trial.folder / "served" / "checkpoint").glob("round-*.json"),
        key=lambda path: int(path.stem.removeprefix("round-")),
    )
    heads = json.loads(checkpoints[-1].read_text())["backend"]["heads"]
    for i, name in enumerate(trial.names):
        if str(i) not in heads:
            continue
        charged = trial.rounds(name)
        trial.check(charged == sorted(set(charged)), f"{name} was charged for {charged}")
        trial.check(len(charged) <= CAP, f"{name} took part in {len(charged)} rounds")
        with Ledger.open(trial.ledger(name), client=name, readonly=True) as ledger:
            rows, head = heads[str(i)]
            ledger.check_head((rows, head))
            spent = epsilon(ledger.history(name), DELTA)
        trial.check(spent <= budgets[name], f"{name} spent {spent} of {budgets[name]}")
    trial.check(len(trial.rounds(LATE)) == LATE_ROUNDS, f"{LATE}: {trial.rounds(LATE)}")
    trial.check("above policy.max_epsilon" in trial.log("server"), f"{LATE} refused no round")
    for name, t in LEAVE.items():
        trial.check(not [r for r in trial.rounds(name) if r > t + 2], f"{name} came back")


def simulated_accuracies(trial: Trial, folder: Path) -> list[float]:
    """Return the accuracies of the same training without faults, with other seeds."""
    config = build(trial.raw, registry())
    return [
        run(replace(config, run=replace(config.run, seed=seed)), folder / str(seed))[
            "test_accuracy"
        ]
        for seed in range(SIMULATED_SEEDS)
    ]


@pytest.mark.endurance
@pytest.mark.timeout(LIMIT + 120)
def test_a_long_federation_keeps_every_promise(tmp_path: Path) -> None:
    sections = {
        "data": {"partition": "iid"},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.01},
        "privacy": {"sigma": 0.6, "clip": 1.0, "batch": 64},
        "run": {
            "rounds": ROUNDS,
            "local_steps": 4,
            "participation": COHORT / CLIENTS,
            "cohort_choice": "balanced",
            "max_rounds_per_client": CAP,
            "min_clients": 1,
            "eval_every": 1,
        },
        "federation": {"server": "hub", "timeout": 12.0, "retries": 0, "patience": ROUNDS},
    }
    with Trial(tmp_path / "trial", CLIENTS, **sections) as trial:
        accuracies = simulated_accuracies(trial, tmp_path / "simulated")
        budgets = write_policies(trial)
        endurance = Endurance(trial)
        endurance.run()
        seconds = time.monotonic() - endurance.started
        result = trial.result()
        ended = (result["state"], result["rounds"])
        trial.check(ended == ("finished", ROUNDS), f"the run ended as {ended}")
        check_ledgers(trial, budgets)
        trial.check(min(accuracies) > 0.7, f"even without faults nothing is learnt: {accuracies}")
        found = result["test_accuracy"]
        spread = max(accuracies) - min(accuracies)
        trial.check(found >= min(accuracies) - spread, f"{found} and not {accuracies}")
        lost = trial.log("server").count("the round is lost")
    # The processes have ended, so their processor time is known.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{seconds:.0f} s, of processors {used.ru_utime + used.ru_stime:.0f} s, "
        f"{lost} lost rounds, accuracy {found:.3f}, "
        f"without faults {min(accuracies):.3f} to {max(accuracies):.3f}"
    )

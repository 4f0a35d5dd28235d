"""Run the commands of docs/federation/flower.md: two clients, TLS and keys.

    python tests/helpers/flower_commands.py            less than a minute on an idle machine

The program replaces hosts by 127.0.0.1, ports by free ones and /srv by a temporary folder. It ends
all processes that it started by their ids, and all that Flower started below them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w
from loopback_trial import SERVER, Trial, run_command
from processes import children_of
from safetensors.torch import load_file

from dpfed.federation.flower.keeper import PDEATHSIG
from dpfed.federation.flower.processes import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "federation" / "flower.md"
BLOCK = re.compile(r"^# Use Flower's own commands$.*?^```sh\n(.*?)^```$", re.M | re.S)
COMMANDS = (
    "flower-superlink",
    "flwr supernode register",
    "flower-supernode",
    "python -m",
    "flwr run",
)
HUB = "hub.example.org:8000"
HERE = "127.0.0.1"
# An option of prctl: orphaned processes below this one become its children, so it can end them.
SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)
ROUNDS = 2
# Seconds for everything, on a busy machine.
LIMIT = 400


def read_page() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the environment and the commands of the page; keys are the commands' first words."""
    found = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has no such block"
    lines = found[1].replace("\\\n", " ").splitlines()
    split_lines = [shlex.split(line, comments=True) for line in lines]
    first, *others = [words for words in split_lines if words]
    assert first[0] == "export", first
    commands = dict(zip(COMMANDS, others, strict=True))
    assert all(" ".join(words).startswith(begin) for begin, words in commands.items()), commands
    return dict(word.split("=", 1) for word in first[1:]), commands


class Flower:
    """The page's commands in the folder of a trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        quiet, self.commands = read_page()
        home = trial.folder / "flower-home"
        # Flower starts its own programs by name.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.options: dict[str, Any] = {
            "env": {**quiet, "FLWR_HOME": str(home), "PATH": path},
            "cwd": trial.folder,
        }
        home.mkdir()
        authority = str(trial.folder / "keys" / "ca.crt")
        hub = {"address": f"{HERE}:{trial.port}", "root-certificates": authority}
        text = tomli_w.dumps({"superlink": {SERVER: hub}})
        (home / "config.toml").write_text(text, encoding="utf-8")

    def command(self, begin: str, name: str = "") -> list[str]:
        """Return a command of the page with this machine's hosts, ports and folders."""
        here = {
            HUB: f"{HERE}:{self.trial.port}",
            "0.0.0.0": HERE,
            "8000": str(self.trial.port),
            "clinic-a": name,
            "/srv/dpfed/client.toml": str(self.trial.folder / name / "client.toml"),
            "/srv/runs/one": str(self.trial.folder / "served"),
            "/srv/": f"{self.trial.folder}/",
        }
        places = re.compile("|".join(re.escape(place) for place in here))
        words = [places.sub(lambda match: here[match[0]], word) for word in self.commands[begin]]
        if words[0] == "python":
            return [sys.executable, *words[1:]]
        return [str(Path(sys.executable).parent / words[0]), *words[1:]]

    def start(self, log: str, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        options = {**self.options, "preexec_fn": end_with_parent, **more}
        return self.trial.start(log, command, **options)

    def superlink(self) -> None:
        process = self.start("superlink", self.command("flower-superlink"))
        while not listens(self.trial.port):
            assert process.poll() is None, self.trial.log("superlink")
            time.sleep(0.1)

    def register(self, name: str) -> None:
        run_command(self.command("flwr supernode register", name), **self.options)

    def supernode(self, name: str) -> None:
        """Start a SuperNode with a port of its own, since all share this machine."""
        command = [*self.command("flower-supernode", name), "--port", str(free_port())]
        self.start(name, command, cwd=self.trial.folder / "keys" / name)

    def run(self) -> None:
        run_command(self.command("python -m"), **self.options)
        self.trial.wait(self.start("run", self.command("flwr run")), LIMIT, "run")

    def run_all(self) -> None:
        """Run all commands in the order of the page."""
        self.superlink()
        for name in self.trial.names:
            self.register(name)
            self.supernode(name)
        self.run()


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((HERE, port), 1.0).close()
        return True
    return False


def end_with_parent() -> None:
    """Ask the kernel to end the new process when this program is killed."""
    LIBC.prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def no_process_left(limit: int) -> Iterator[None]:
    """End all processes below this one on every exit, also after a signal or `limit` seconds."""

    def leave(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            raise SystemExit(f"this has not ended within {limit} s")
        raise SystemExit(128 + number)

    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
    for number in handled:
        signal.signal(number, leave)
    signal.alarm(limit)
    try:
        yield
    finally:
        # Ending the processes takes seconds and must not be interrupted.
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        end_children(patience=5.0)


def end_children(patience: float) -> None:
    """Wait for the processes below this one, and kill those that still run after `patience`."""
    end = time.monotonic() + patience
    while left := children_of(os.getpid()):
        for pid in left:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def check(trial: Trial) -> None:
    """Check that the run's folder is complete and that ledgers contain both rounds once."""
    result = trial.result()
    assert result["state"] == "finished", result
    assert result["rounds"] == ROUNDS, result
    assert not result["release"].startswith("simulation"), result["release"]
    # The output of the ServerApp, as `flwr run --stream` shows it.
    log = trial.log("run")
    assert f"dpfed: round {ROUNDS}/{ROUNDS}" in log, log
    assert "left out" not in log, log
    served = trial.folder / "served"
    files = {path.name for path in served.iterdir()}
    assert {"config.toml", "metrics.jsonl", "model.safetensors", "run.json"} <= files
    assert len((served / "metrics.jsonl").read_text().splitlines()) >= ROUNDS
    theta = load_file(served / "model.safetensors")
    assert max(float(value.abs().max()) for value in theta.values()) > 1e-3, "nothing was trained"
    for name in trial.names:
        rows = trial.rows(name)
        assert [row.charge.round for row in rows] == list(range(1, ROUNDS + 1)), rows
        assert all(row.charge.noise == "os" and not row.charge.void for row in rows), rows


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dpfed-flower-") as folder,
        no_process_left(LIMIT),
        Trial(Path(folder), clients=2, secure=True, run={"rounds": ROUNDS}) as trial,
    ):
        try:
            Flower(trial).run_all()
            check(trial)
        except BaseException:
            for name in ("superlink", *trial.names, "run"):
                print(f"--- {name}.log\n{trial.log(name)[-2000:]}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main()

"""The commands of docs/federation.md, "With Flower's own commands", as they stand there: two clients, TLS and keys on.

    python scripts/flower_commands.py            in under a minute on an idle machine

Only places and names are replaced: hosts by 127.0.0.1, ports by free ones, /srv by a temporary folder. What is started is
ended by process id on every way out, and so is all that Flower starts underneath.
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
from federation_check import children_of, rows_of
from loopback_trial import SERVER, Trial, done, free_port
from safetensors.torch import load_file

from dpfed.federation.flower.child import PDEATHSIG
from dpfed.privacy.ledger.ledger import Ledger

PAGE = Path(__file__).resolve().parent.parent / "docs" / "federation.md"
BLOCK = re.compile(r"^## With Flower's own commands$.*?^```sh\n(.*?)^```$", re.M | re.S)
COMMANDS = (
    "flower-superlink",
    "flwr supernode register",
    "flower-supernode",
    "python -m",
    "flwr run",
)
HUB, HERE = "hub.example.org:8000", "127.0.0.1"
SUBREAPER = 36  # of prctl: what Flower's processes leave behind becomes ours, and can be ended
LIBC = ctypes.CDLL(None, use_errno=True)
ROUNDS = 2
LIMIT = 240  # seconds for everything, on a busy machine


def on_page() -> tuple[dict[str, str], dict[str, list[str]]]:
    """The environment and the commands of the page, each by how it begins."""
    found = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has no such block"
    lines = found[1].replace("\\\n", " ").splitlines()
    first, *others = [
        words for words in (shlex.split(line, comments=True) for line in lines) if words
    ]
    assert first[0] == "export", first
    commands = dict(zip(COMMANDS, others, strict=True))
    assert all(" ".join(words).startswith(begin) for begin, words in commands.items()), commands
    return dict(word.split("=", 1) for word in first[1:]), commands


class Flower:
    """The page's commands in the folder of a trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        quiet, self.commands = on_page()
        home, programs = trial.folder / "flower-home", Path(sys.executable).parent
        # Flower starts its own programs by name.
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.more: dict[str, Any] = {
            "env": {**quiet, "FLWR_HOME": str(home), "PATH": path},
            "cwd": trial.folder,
        }
        home.mkdir()
        hub = {
            "address": f"{HERE}:{trial.port}",
            "root-certificates": str(trial.folder / "keys" / "ca.crt"),
        }
        (home / "config.toml").write_text(
            tomli_w.dumps({"superlink": {SERVER: hub}}), encoding="utf-8"
        )

    def command(self, begin: str, name: str = "") -> list[str]:
        """As on the page, with this machine's places in it."""
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
        program = (
            sys.executable if words[0] == "python" else str(Path(sys.executable).parent / words[0])
        )
        return [program, *words[1:]]

    def start(self, log: str, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return self.trial.start(log, command, **{**self.more, "preexec_fn": end_with_us, **more})

    def superlink(self) -> None:
        process = self.start("superlink", self.command("flower-superlink"))
        while not listens(self.trial.port):
            assert process.poll() is None, self.trial.log("superlink")
            time.sleep(0.1)

    def register(self, name: str) -> None:
        done(self.command("flwr supernode register", name), **self.more)

    def supernode(self, name: str) -> None:
        """Each has a machine of its own on the page; here it needs a port of its own."""
        command = [*self.command("flower-supernode", name), "--port", str(free_port())]
        self.start(name, command, cwd=self.trial.folder / "keys" / name)

    def run(self) -> None:
        done(self.command("python -m"), **self.more)
        self.trial.wait(self.start("run", self.command("flwr run")), LIMIT, "run")


def play(flower: Flower) -> None:
    """In the order of the page."""
    flower.superlink()
    for name in flower.trial.names:
        flower.register(name)
        flower.supernode(name)
    flower.run()


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((HERE, port), 1.0).close()
        return True
    return False


def end_with_us() -> None:
    """For the one way out on which nothing can be ended, being killed; Flower's own look after what they start."""
    LIBC.prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def nothing_left(limit: int) -> Iterator[None]:
    """Signals, and the clock, lead out as an error does; whatever then still runs below this process is ended."""

    def out(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            raise SystemExit(f"this has not ended within {limit} s")
        raise SystemExit(128 + number)

    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    ways_out = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
    for number in ways_out:
        signal.signal(number, out)
    signal.alarm(limit)
    try:
        yield
    finally:
        for number in ways_out:  # this takes seconds, and is not to be interrupted
            signal.signal(number, signal.SIG_IGN)
        end = time.monotonic() + 5.0  # which they have to end by themselves
        while left := children_of(os.getpid()):
            for pid in left:
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)


def check(trial: Trial) -> None:
    """The run's folder is whole, and every client has paid for both rounds with noise that counts."""
    result, log = (
        trial.result(),
        trial.log("run"),
    )  # what the ServerApp says, as `flwr run --stream` shows it
    assert result["state"] == "finished", result
    assert result["rounds"] == ROUNDS, result
    assert not result["release"].startswith("simulation"), result["release"]
    assert f"dpfed: round {ROUNDS}/{ROUNDS}" in log, log
    assert "left out" not in log, log
    served = trial.folder / "served"
    assert {"config.toml", "metrics.jsonl", "model.safetensors", "run.json"} <= {
        path.name for path in served.iterdir()
    }
    assert len((served / "metrics.jsonl").read_text().splitlines()) >= ROUNDS
    theta = load_file(served / "model.safetensors")
    assert max(float(value.abs().max()) for value in theta.values()) > 1e-3, "nothing was trained"
    for name in trial.names:
        rows = rows_of(trial, name)
        assert [row.charge.round for row in rows] == list(range(1, ROUNDS + 1)), rows
        assert all(row.charge.noise == "os" and not row.charge.void for row in rows), rows
        with Ledger.open(trial.ledger(name), client=name) as ledger:
            assert ledger.verify().rows == ROUNDS


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpfed-flower-") as folder, nothing_left(LIMIT):
        with Trial(Path(folder), clients=2, secure=True, run={"rounds": ROUNDS}) as trial:
            try:
                play(Flower(trial))
                check(trial)
            except BaseException:
                for name in ("superlink", *trial.names, "run"):
                    print(f"--- {name}.log\n{trial.log(name)[-2000:]}", file=sys.stderr)
                raise
        print(
            *(line for line in trial.log("run").splitlines() if line.startswith("dpfed: round")),
            sep="\n",
        )
    print(f"flower's own commands: passed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

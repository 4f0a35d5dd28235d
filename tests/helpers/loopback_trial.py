"""A federation on this machine as real processes: files, keys, `dpfed server` and `dpfed client`.

The processes use free ports of 127.0.0.1 and are ended by their ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import tomli_w

from dpfed.config import build
from dpfed.data.sources.digits import Digits
from dpfed.federation.flower.processes import free_port
from dpfed.privacy.ledger.charge import Row
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.registry import registry
from dpfed.training.job.job import Job, prepare

DPFED = [sys.executable, "-m", "dpfed"]
SERVER = "hub"
THREADS = {"OMP_NUM_THREADS": "1"}


class TrialError(Exception):
    """A process of a trial failed or took too long; the message ends with its log."""


class Trial:
    """A server and its clients in one folder.

    With `secure` they use TLS and keys. Without it they run in test mode.
    """

    def __init__(
        self, folder: Path, clients: int = 3, secure: bool = True, **sections: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.secure = secure
        self.port = free_port()
        self.running: list[subprocess.Popen[bytes]] = []
        self.names = [f"clinic-{i}" for i in range(clients)]
        folder.mkdir(parents=True, exist_ok=True)
        digits = Digits().load()
        # Digits have pixels from 0 to 16, and a source of arrays expects 0 to 255.
        whole = {
            "x_train": digits.train.inputs["pixel_values"] * np.uint8(15),
            "y_train": digits.train.labels,
            "x_test": digits.test.inputs["pixel_values"] * np.uint8(15),
            "y_test": digits.test.labels,
        }
        np.savez(folder / "all.npz", **whole)
        self.raw = raw_config(folder, clients, sections)
        job = prepare(build(self.raw, registry()))
        sizes = zip(self.names, job.plan.sizes, strict=True)
        self.raw["federation"]["clients"] = {name: int(size) for name, size in sizes}
        (folder / "cfg.toml").write_text(tomli_w.dumps(self.raw), encoding="utf-8")
        if secure:
            make_keys(folder / "keys", self.names)
        for i, name in enumerate(self.names):
            self._write_client(job, i, name, whole)

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for process in self.running:
            if process.poll() is None:
                process.terminate()
        for process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def server(self, *more: str, out: str = "served") -> subprocess.Popen[bytes]:
        how = ["--keys", str(self.folder / "keys")] if self.secure else ["--insecure"]
        listen = ["--listen", f"127.0.0.1:{self.port}"]
        config = [] if "--resume" in more else [str(self.folder / "cfg.toml")]
        out_option = ["--out", str(self.folder / out)]
        return self.start("server", [*DPFED, "server", *config, *out_option, *how, *listen, *more])

    def client(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        how = [] if self.secure else ["--insecure"]
        file = str(self.folder / name / "client.toml")
        return self.start(name, [*DPFED, "client", file, *how, *more])

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, process: subprocess.Popen[bytes], limit: float, name: str = "server") -> None:
        """Wait until a process has ended with exit code 0."""
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            self.fail(f"{name} has not ended within {limit:g} s", name)
        if code != 0:
            self.fail(f"{name} ended with {code}", name)

    def wait_for_text(self, name: str, text: str, limit: float) -> None:
        """Wait until the log of `name` contains `text`."""
        self.wait_for(f"{text!r} in the log of {name}", lambda: text in self.log(name), limit)

    def wait_for(self, what: str, holds: Callable[[], bool], limit: float = 60.0) -> None:
        end = time.monotonic() + limit
        while not holds():
            if time.monotonic() > end:
                self.fail(f"waited {limit:g} s for: {what}")
            time.sleep(0.05)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def fail(self, what: str, *names: str) -> NoReturn:
        """Raise with the end of these logs, or of all logs."""
        logs = [f"--- {name}\n{self.log(name)[-3000:]}" for name in names or self._log_names()]
        raise TrialError("\n".join([what, *logs]))

    def result(self, out: str = "served") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / out / "run.json").read_text())
        return found

    def ledger(self, name: str) -> Path:
        return self.folder / name / "state" / "ledger.db"

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a client's ledger after a check of its whole hash chain."""
        with Ledger.open(self.ledger(name), client=name, readonly=True) as ledger:
            ledger.verify()
            return list(ledger.rows())

    def rounds(self, name: str) -> list[int]:
        """Return the rounds that a client's ledger was charged for."""
        return [row.charge.round for row in self.rows(name)]

    def start(self, name: str, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        """Start a process that the trial ends; its log is appended to NAME.log.

        `more` goes to Popen.
        """
        more["env"] = {**os.environ, **THREADS, "PYTHONUNBUFFERED": "1", **more.get("env", {})}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **more)
        self.running.append(process)
        return process

    def _log_names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.log"))

    def _write_client(self, job: Job, i: int, name: str, whole: dict[str, np.ndarray]) -> None:
        """Write client.toml and the client's own records, in the order of the simulation."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        rows = job.private.shards.of(i)
        own = {key: value[rows] if key.endswith("train") else value for key, value in whole.items()}
        np.savez(home / "own.npz", **own)
        raw: dict[str, Any] = {
            "client": {
                "name": name,
                "state": "state",
                "servers": [SERVER],
                "device": "cpu",
                "allow_seeded": not self.secure,
            },
            "policy": {"records": len(rows), "max_epsilon": 100.0, "max_rate": 0.2},
            "data": {"name": "npz", "path": str(home / "own.npz"), "classes": 10},
            "model": self.raw["model"],
            "link": {"address": f"127.0.0.1:{self.port}"},
        }
        if self.secure:
            keys = self.folder / "keys" / name
            raw["link"] |= {"ca": str(keys / "ca.crt"), "key": str(keys / "client.key")}
        (home / "client.toml").write_text(tomli_w.dumps(raw), encoding="utf-8")


def raw_config(folder: Path, clients: int, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    raw: dict[str, dict[str, Any]] = {
        "data": {"name": "npz", "path": str(folder / "all.npz"), "classes": 10, "clients": clients},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.01},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 32},
        "run": {"rounds": 3, "local_steps": 2, "participation": 1.0, "device": "cpu"},
        "federation": {"server": SERVER, "timeout": 180.0},
    }
    for name, table in sections.items():
        raw[name] = {**raw.get(name, {}), **table}
    return raw


def make_keys(folder: Path, clients: list[str]) -> None:
    names = ["--clients", ",".join(clients)]
    run_command([*DPFED, "keys", str(folder), "--server", "127.0.0.1", *names])


def run_command(command: list[str], **more: Any) -> str:
    """Run a command and return its output; `more` goes to subprocess.run."""
    more["env"] = {**os.environ, **THREADS, **more.get("env", {})}
    found = subprocess.run(command, capture_output=True, text=True, **more)
    if found.returncode != 0:
        output = (found.stdout + found.stderr)[-3000:]
        raise TrialError(f"{' '.join(command)} ended with {found.returncode}:\n{output}")
    return found.stdout

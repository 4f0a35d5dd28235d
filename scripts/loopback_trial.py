"""A federation on this machine as real processes: files, keys, `dpfed server`, `dpfed client`; ended by process id.

For federation_check.py, federation_faults.py, flower_commands.py and benchmarks/federation_cost.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tomli_w

from dpfed.config import build
from dpfed.data.sources.digits import Digits
from dpfed.registry import registry
from dpfed.training.job.job import Job, prepare

DPFED = [sys.executable, "-m", "dpfed"]
SERVER = "hub"
THREADS = {"OMP_NUM_THREADS": "1"}


class Trial:
    """Everything is in one folder. `secure`: TLS and keys; otherwise test mode, without both."""

    def __init__(
        self, folder: Path, clients: int = 3, secure: bool = True, **sections: dict[str, Any]
    ) -> None:
        self.folder, self.secure, self.port = folder, secure, free_port()
        self.running: list[subprocess.Popen[bytes]] = []
        self.names = [f"clinic-{i}" for i in range(clients)]
        folder.mkdir(parents=True, exist_ok=True)
        digits = Digits().load()
        whole = {
            "x_train": digits.train.inputs["pixel_values"],
            "y_train": digits.train.labels,
            "x_test": digits.test.inputs["pixel_values"],
            "y_test": digits.test.labels,
        }
        np.savez(folder / "all.npz", **whole)
        self.raw = raw_config(folder, clients, sections)
        job = prepare(build(self.raw, registry()))
        self.raw["federation"]["clients"] = {
            name: int(size) for name, size in zip(self.names, job.plan.sizes, strict=True)
        }
        (folder / "cfg.toml").write_text(tomli_w.dumps(self.raw), encoding="utf-8")
        if secure:
            done(
                [
                    *DPFED,
                    "keys",
                    str(folder / "keys"),
                    "--server",
                    "127.0.0.1",
                    "--clients",
                    ",".join(self.names),
                ]
            )
        for i, name in enumerate(self.names):
            self._client(job, i, name, whole)

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
        return self.start(
            "server",
            [*DPFED, "server", *config, "--out", str(self.folder / out), *how, *listen, *more],
        )

    def client(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        how = [] if self.secure else ["--insecure"]
        return self.start(
            name, [*DPFED, "client", str(self.folder / name / "client.toml"), *how, *more]
        )

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, process: subprocess.Popen[bytes], limit: float, name: str = "server") -> None:
        """Until it has ended well; its log is in the error otherwise."""
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{name} has not ended within {limit:g} s:\n{self.log(name)[-3000:]}"
            ) from None
        if code != 0:
            raise SystemExit(f"{name} ended with {code}:\n{self.log(name)[-3000:]}")

    def until(self, name: str, text: str, limit: float, times: int = 1) -> None:
        """Until a log says it."""
        end = time.monotonic() + limit
        while self.log(name).count(text) < times:
            if time.monotonic() > end:
                raise SystemExit(
                    f"{name} does not say {text!r} within {limit:g} s:\n{self.log(name)[-3000:]}"
                )
            time.sleep(0.1)

    def result(self, out: str = "served") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / out / "run.json").read_text())
        return found

    def ledger(self, name: str) -> Path:
        return self.folder / name / "state" / "ledger.db"

    def start(self, name: str, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        """With its log in NAME.log, to be ended with the trial; `more` is for Popen."""
        more["env"] = {**os.environ, **THREADS, "PYTHONUNBUFFERED": "1", **more.get("env", {})}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **more)
        self.running.append(process)
        return process

    def _client(self, job: Job, i: int, name: str, whole: dict[str, np.ndarray]) -> None:
        """A client holds its own records only, in the order in which the simulation has dealt them."""
        home, rows = self.folder / name, job.shards.of(i)
        home.mkdir(exist_ok=True)
        own = {key: value[rows] if key.endswith("train") else value for key, value in whole.items()}
        np.savez(home / "own.npz", **own)
        keys = self.folder / "keys" / name
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
            raw["link"] |= {"ca": str(keys / "ca.crt"), "key": str(keys / "client.key")}
        (home / "client.toml").write_text(tomli_w.dumps(raw), encoding="utf-8")


def raw_config(folder: Path, clients: int, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    raw: dict[str, dict[str, Any]] = {
        "data": {"name": "npz", "path": str(folder / "all.npz"), "classes": 10, "clients": clients},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.01},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 32},
        "run": {"rounds": 3, "local_steps": 2, "participation": 1.0, "device": "cpu"},
        "federation": {"server": SERVER, "timeout": 60.0},
    }
    for name, table in sections.items():
        raw[name] = {**raw.get(name, {}), **table}
    return raw


def done(command: list[str], **more: Any) -> str:
    """What it prints, once it has ended well; `more` is for subprocess.run."""
    more["env"] = {**os.environ, **THREADS, **more.get("env", {})}
    found = subprocess.run(command, capture_output=True, text=True, **more)
    if found.returncode != 0:
        said = (found.stdout + found.stderr)[-3000:]
        raise SystemExit(f"{' '.join(command)} ended with {found.returncode}:\n{said}")
    return found.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Real federations on this machine, as a stage of the checks: three clients and a server, each its own process.

    python scripts/federation_check.py            both, in under three minutes
    python scripts/federation_check.py secure     TLS and keys on, real noise: what a hospital runs
    python scripts/federation_check.py parity     test mode: the same numbers as `dpfed run` with the same configuration

Everything is started here on free ports of 127.0.0.1, and ended by process id.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from loopback_trial import DPFED, Trial, done
from safetensors.torch import load_file

from dpfed.privacy.ledger import Ledger

LIMIT = 120.0


def secure(folder: Path) -> None:
    """TLS and keys: all rounds run, each client's ledger has a row for each, none of them void, no process is left."""
    with Trial(folder, secure=True) as trial:
        clients = [trial.client(name) for name in trial.names]
        server = trial.server()
        trial.wait(server, LIMIT)
        result = trial.result()
        assert result["state"] == "finished", result
        assert result["rounds"] == 3, result
        assert "left out" not in trial.log("server"), trial.log("server")
        assert not result["release"].startswith("simulation"), result["release"]
        assert all(client.poll() is None for client in clients), "a client went away with the server"
    for name in trial.names:
        rows = rows_of(trial, name)
        assert [row.charge.round for row in rows] == [1, 2, 3], rows
        assert not any(row.charge.void for row in rows), rows


def parity(folder: Path) -> None:
    """Test mode: the networked run ends where the simulation of the same configuration does; every row is void."""
    with Trial(folder, secure=False, algorithm={"name": "dp-scaffold", "lr": 0.05}) as trial:
        done([*DPFED, "run", str(folder / "cfg.toml"), "--out", str(folder / "simulated")])
        for name in trial.names:
            trial.client(name)
        trial.wait(trial.server(), LIMIT)
    one, two = (load_file(folder / out / "model.safetensors") for out in ("simulated", "served"))
    apart = max(float((one[key] - two[key]).abs().max()) for key in one)
    print(f"largest difference between the simulated and the networked theta: {apart:.2g}")
    assert apart < 1e-5, apart
    for name in trial.names:
        rows = rows_of(trial, name)
        assert [row.charge.round for row in rows] == [1, 2, 3], rows
        assert all(row.charge.void for row in rows), "repeatable noise must not count as spending, nor as protection"


def rows_of(trial: Trial, name: str) -> list:
    with Ledger.open(trial.ledger(name), client=name) as ledger:
        return list(ledger.rows())


def main() -> None:
    wanted = sys.argv[1:] or ["secure", "parity"]
    for name in wanted:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dpfed-federation-") as folder:
            {"secure": secure, "parity": parity}[name](Path(folder))
        print(f"{name}: passed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

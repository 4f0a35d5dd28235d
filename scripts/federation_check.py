"""Real federations on this machine, as a stage of the checks: three clients and a server, each its own process.

    python scripts/federation_check.py            both, in under three minutes
    python scripts/federation_check.py secure     TLS and keys on, real noise: what a hospital runs
    python scripts/federation_check.py parity     test mode: the same numbers as `dpfed run` with the same configuration

Everything is started here on free ports of 127.0.0.1, and ended by process id.
"""

from __future__ import annotations

import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from loopback_trial import DPFED, Trial, done
from safetensors.torch import load_file

from dpfed.privacy.ledger.ledger import Ledger

LIMIT = 120.0


def secure(folder: Path) -> None:
    """TLS and keys: all rounds run, each client's ledger has a row for each, none of them void; the port is closed
    to others, and a SuperNode does not outlive its client."""
    with Trial(folder, secure=True) as trial:
        clients = [trial.client(name) for name in trial.names]
        server = trial.server()
        trial.until("server", "clients connect to", LIMIT)
        closed(trial)
        trial.wait(server, LIMIT)
        result = trial.result()
        assert result["state"] == "finished", result
        assert result["rounds"] == 3, result
        assert "left out" not in trial.log("server"), trial.log("server")
        assert not result["release"].startswith("simulation"), result["release"]
        assert all(client.poll() is None for client in clients), (
            "a client went away with the server"
        )
        children = children_of(clients[0].pid)
        assert children, "a client has a SuperNode underneath"
        clients[0].kill()
        clients[0].wait()
        gone(children)
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
    assert max(float(value.abs().max()) for value in two.values()) > 1e-3, "nothing was trained"
    for name in trial.names:
        rows = rows_of(trial, name)
        assert [row.charge.round for row in rows] == [1, 2, 3], rows
        assert all(row.charge.void for row in rows), (
            "repeatable noise must not count as spending, nor as protection"
        )


def closed(trial: Trial) -> None:
    """Who is no client gets nothing from the one port that there is: no keys registered, no runs started or listed."""
    known = ssl.create_default_context(cafile=str(trial.folder / "keys" / "ca.crt"))
    for path in (
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/openapi.json",
    ):
        request = urllib.request.Request(
            f"https://127.0.0.1:{trial.port}{path}", data=b"", method="POST"
        )
        try:
            code = urllib.request.urlopen(request, context=known, timeout=30).status
        except urllib.error.HTTPError as error:
            code = error.code
        assert code == 404, f"{path} answers {code} to everyone"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while any(running(pid) for pid in pids):
        assert time.monotonic() < end, f"of {pids} some have outlived their parent"
        time.sleep(0.1)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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

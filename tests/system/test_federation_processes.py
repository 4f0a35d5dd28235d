"""Real federations on this machine: three clients and a server, each its own process."""

from __future__ import annotations

import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from loopback_trial import DPFED, Trial, run_command
from processes import children_of, wait_until_ended
from safetensors.torch import load_file

LIMIT = 240.0
FLOWER_COMMANDS = Path(__file__).parents[1] / "helpers" / "flower_commands.py"
CLOSED_PATHS = (
    "/v1/control/register-node",
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/openapi.json",
)


@pytest.mark.federation
@pytest.mark.timeout(500)
def test_a_federation_with_tls_and_keys_charges_every_client_once_per_round(
    tmp_path: Path,
) -> None:
    with Trial(tmp_path, secure=True) as trial:
        clients = [trial.client(name) for name in trial.names]
        server = trial.server()
        trial.wait_for_text("server", "clients connect to", LIMIT)
        assert_port_is_closed_to_others(trial)
        trial.wait(server, LIMIT)
        result = trial.result()
        assert (result["state"], result["rounds"]) == ("finished", 3)
        assert not result["release"].startswith("simulation")
        assert "left out" not in trial.log("server")
        assert all(client.poll() is None for client in clients), "clients must outlive the server"
        supernodes = children_of(clients[0].pid)
        assert supernodes
        clients[0].kill()
        clients[0].wait()
        wait_until_ended(supernodes)
    for name in trial.names:
        rows = trial.rows(name)
        assert [row.charge.round for row in rows] == [1, 2, 3]
        assert not any(row.charge.void for row in rows)


def assert_port_is_closed_to_others(trial: Trial) -> None:
    """Only clients may use the one open port: others can neither register keys nor start runs."""
    known = ssl.create_default_context(cafile=str(trial.folder / "keys" / "ca.crt"))
    for path in CLOSED_PATHS:
        url = f"https://127.0.0.1:{trial.port}{path}"
        request = urllib.request.Request(url, data=b"", method="POST")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, context=known, timeout=30)
        assert caught.value.code == 404, path
        caught.value.close()


@pytest.mark.federation
@pytest.mark.timeout(500)
def test_a_federation_in_test_mode_gives_the_numbers_of_the_simulation(tmp_path: Path) -> None:
    with Trial(tmp_path, secure=False, algorithm={"name": "dp-scaffold", "lr": 0.05}) as trial:
        out = str(tmp_path / "simulated")
        run_command([*DPFED, "run", str(tmp_path / "cfg.toml"), "--out", out])
        for name in trial.names:
            trial.client(name)
        trial.wait(trial.server(), LIMIT)
    simulated = load_file(tmp_path / "simulated" / "model.safetensors")
    served = load_file(tmp_path / "served" / "model.safetensors")
    assert max(float((simulated[key] - served[key]).abs().max()) for key in simulated) < 1e-5
    assert max(float(value.abs().max()) for value in served.values()) > 1e-3, "nothing was trained"
    for name in trial.names:
        rows = trial.rows(name)
        assert [row.charge.round for row in rows] == [1, 2, 3]
        assert all(row.charge.void for row in rows), "repeatable noise must not count as spending"


@pytest.mark.federation
@pytest.mark.timeout(500)
def test_the_commands_of_flower_on_the_federation_page_run() -> None:
    """The program ends everything that it has started within 400 seconds."""
    command = [sys.executable, str(FLOWER_COMMANDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stderr

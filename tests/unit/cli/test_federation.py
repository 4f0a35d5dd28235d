"""`dpfed keys`, `server` and `client`: mistakes are one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.errors import DpfedError

CFG = """
[data]
name = "digits"
clients = 2
[model]
name = "linear"
[algorithm]
name = "dp-fedavg"
lr = 0.1
[privacy]
sigma = 1.0
clip = 0.5
batch = 10
[federation.clients]
a = 700
b = 700
"""


def says(*arguments: str) -> str:
    found = CliRunner().invoke(app, [*arguments])
    assert isinstance(found.exception, DpfedError), (found.exception, found.output)
    assert found.exception.code == 2
    sentence = str(found.exception)
    assert "\n" not in sentence
    return sentence


def test_keys_are_made_and_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        app, ["keys", str(tmp_path / "k"), "--server", "127.0.0.1", "--clients", "a, b"]
    )
    assert found.exit_code == 0, found.output
    named = [Path(line) for line in found.stdout.splitlines()[:-1]]
    assert len(named) == 15
    assert all(path.is_file() for path in named)
    found = CliRunner().invoke(app, ["keys", str(tmp_path / "own"), "--client", "a"])
    assert found.exit_code == 0
    assert (tmp_path / "own" / "client.key").is_file()


def test_mistakes_of_keys(tmp_path: Path) -> None:
    folder = str(tmp_path / "k")
    assert "--server" in says("keys", folder)
    assert "no clients" in says("keys", folder, "--server", "hub")
    assert "leave out" in says("keys", folder, "--client", "a", "--server", "hub")
    assert not (tmp_path / "k").exists()


def test_mistakes_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    cfg, out = tmp_path / "cfg.toml", str(tmp_path / "out")
    cfg.write_text(CFG)
    assert "--out" in says("server", str(cfg), "--insecure")
    assert "--keys" in says("server", str(cfg), "--out", out)
    assert "not both" in says(
        "server", str(cfg), "--out", out, "--insecure", "--keys", str(tmp_path)
    )
    assert "--insecure is for tests" in says(
        "server", str(cfg), "--out", out, "--insecure", "--listen", "0.0.0.0:8000"
    )
    assert "host:port" in says("server", str(cfg), "--out", out, "--insecure", "--listen", "hub")
    assert "a.pub cannot be read" in says(
        "server", str(cfg), "--out", out, "--keys", str(tmp_path / "none")
    )
    assert "needs a configuration" in says("server", "--out", out, "--insecure")
    assert "not the folder of a run" in says("server", "--out", out, "--insecure", "--resume")
    cfg.write_text(CFG.replace("[federation.clients]\na = 700\nb = 700\n", ""))
    assert "federation.clients" in says("server", str(cfg), "--out", out, "--insecure")
    assert not (tmp_path / "out").exists()


def test_mistakes_of_a_client(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    path = tmp_path / "client.toml"
    assert "cannot be read" in says("client", str(path))
    text = (
        '[client]\nname = "a"\nstate = "state"\nservers = ["hub"]\n'
        "[policy]\nrecords = 100\nmax_epsilon = 1.0\n"
        '[data]\nname = "digits"\n[model]\nname = "linear"\n'
    )
    path.write_text(text)
    assert "link.ca" in says("client", str(path))
    path.write_text(text + '[link]\naddress = "hub.example.org:8000"\n')
    assert "--insecure is for tests" in says("client", str(path), "--insecure")
    assert not (tmp_path / "state").exists()

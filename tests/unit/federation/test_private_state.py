"""Only their owner can read a client's state, a server's run and keys, whatever the umask."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation_case import client_of, job_of
from served_case import Net, config_of, serve

from dpfed.federation.flower import processes
from dpfed.federation.keys import make_all
from dpfed.federation.links import Address


@pytest.fixture(params=[0o000, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def open_to_others(folder: Path) -> dict[str, str]:
    """Return the modes of files and folders that others can read, write or enter."""
    found = [folder, *folder.rglob("*")]
    modes = {str(path.relative_to(folder)): path.lstat().st_mode & 0o777 for path in found}
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


@pytest.mark.usefixtures("umask")
def test_a_servers_run_and_its_clients_states_are_private(tmp_path: Path) -> None:
    algorithm = {"name": "dp-scaffold", "lr": 0.1}
    job = job_of(algorithm=algorithm)
    serve(
        config_of(job, algorithm=algorithm),
        tmp_path / "out",
        Net(job, tmp_path, seeded=False),
        seeded=False,
    )
    for folder in ("out", "clinic-0", "clinic-1", "clinic-2"):
        assert open_to_others(tmp_path / folder) == {}
    kept = {
        path.name.split("-")[0] for path in (tmp_path / "clinic-0").rglob("*") if path.is_file()
    }
    assert {"ledger.db", "reply", "memory"} <= kept


def test_a_state_folder_of_an_older_version_is_restricted_when_its_client_starts(
    tmp_path: Path,
) -> None:
    job = job_of()
    stored = tmp_path / "clinic-0" / "runs" / "abc" / "reply-1-x"
    stored.parent.mkdir(parents=True)
    stored.write_bytes(b"noised")
    for path in (tmp_path / "clinic-0", *(tmp_path / "clinic-0").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    others = tmp_path / "clinic-0" / "run.sh"
    others.touch(mode=0o755)
    client_of(job, 0, tmp_path)
    assert open_to_others(tmp_path / "clinic-0") == {"run.sh": "0o755"}


@pytest.mark.usefixtures("umask")
def test_keys_in_a_folder_that_was_open_to_others_are_private(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    make_all(tmp_path / "keys", "127.0.0.1", ["clinic-a"])
    assert open_to_others(tmp_path / "keys") == {}


@pytest.mark.usefixtures("umask")
def test_what_a_link_writes_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper of a SuperLink writes a file of its own beside the log."""
    (tmp_path / "child.py").write_text(
        "import pathlib, os; pathlib.Path(os.environ['FLWR_HOME'], 'state').touch()"
    )
    monkeypatch.setattr(processes, "KEEPER", [sys.executable, "-m", "child"])
    monkeypatch.setattr(processes, "program", lambda name: name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    listen = Address("127.0.0.1", processes.free_port())
    with processes.superlink(listen, tmp_path / "home", None) as process:
        assert process.popen.wait(60) == 0
    assert {path.name for path in (tmp_path / "home").iterdir()} == {
        "superlink.log",
        "state",
        "secret",
    }
    assert open_to_others(tmp_path / "home") == {}

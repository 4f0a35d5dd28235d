"""`dpfed client` starts its SuperNode again, and gives up if no server accepts it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfed.cli import client as module
from dpfed.cli.client import ACCEPTED, keep_going
from dpfed.errors import DpfedError
from dpfed.federation.flower import processes
from dpfed.federation.links import Address
from dpfed.federation.log_line import to_stderr

HUB = Address("hub", 1)


class Ended:
    """A SuperNode that has written a text into its log and ended; a context, as the real one."""

    def __init__(self, home: Path, text: str) -> None:
        home.mkdir(exist_ok=True)
        self.log = home / "supernode.log"
        self.ended = 0
        with self.log.open("a") as file:
            file.write(text)

    def __enter__(self) -> Ended:
        return self

    def __exit__(self, *error: object) -> None:
        self.ended += 1


class StopError(Exception):
    pass


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Ended]:
    """Return the list of started processes; waiting and work are replaced."""
    started: list[Ended] = []
    monkeypatch.setattr(module, "work", lambda *given: None)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.0)
    return started


def texts(monkeypatch: pytest.MonkeyPatch, started: list[Ended], *said: str) -> None:
    def start(address: Address, home: Path, link: Any, relay: str) -> Ended:
        started.append(Ended(home, said[min(len(started), len(said) - 1)]))
        if len(started) == 20:
            raise StopError
        return started[-1]

    monkeypatch.setattr(processes, "supernode", start)


def go(tmp_path: Path) -> None:
    stop: Any = lambda: None  # noqa: E731
    listener: Any = SimpleNamespace(path="relay")
    handler: Any = None
    keep_going(HUB, tmp_path / "home", None, listener, handler, stop, to_stderr)


def test_a_client_that_no_server_accepts_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: list[Ended]
) -> None:
    texts(monkeypatch, starts, "ERROR : Failed to activate SuperNode.\n")
    with pytest.raises(
        DpfedError, match=r"hub:1 does not take this client \(ERROR : Failed to activate"
    ):
        go(tmp_path)
    assert len(starts) == module.TRIES
    assert all(process.ended == 1 for process in starts)


def test_a_client_that_was_accepted_once_never_gives_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starts: list[Ended],
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts(
        monkeypatch,
        starts,
        "ERROR : not yet\n",
        f"INFO : {ACCEPTED.decode()}: 7\nERROR : 401 Unauthorized\n",
        "ERROR : away\n",
    )
    with pytest.raises(StopError):
        go(tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert ["not yet" in said[0], "401" in said[1], "away" in said[2]] == [True] * 3
    assert all(process.ended == 1 for process in starts[:-1])

"""The status of a running federation: connected clients, round, score, epsilon and refusals.

The server writes the status to a file beside the run's folder. `dpfed server --status` and the page
of `dpfed report --watch` read this file. It names clients, so only its owner can read it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.federation.log_line import Log, LogLine
from dpfed.privacy.published import show_loss, show_perplexity, show_score
from dpfed.training.callbacks.base import Callback
from dpfed.training.evaluation import perplexity
from dpfed.training.job.job import Job
from dpfed.training.rounds import Round
from dpfed.training.run_folder.atomic_file import write_file

STATUS = "status.json"
# Shortest time in seconds between two writings of the file if no client's connection has changed.
WRITE_S = 1.0
# Largest number of refusals in the status file. Only the latest refusals stay in it.
KEPT = 50
RUNNING = ("waiting", "training")


def flower_home(out: Path) -> Path:
    """Return the folder for Flower's files and the status file, beside the run's folder `out`."""
    return out.parent / f".{out.name}.flower"


def status_file(out: Path) -> Path:
    return flower_home(out) / STATUS


class Status(Callback):
    """Callback that keeps the status file of a server up to date.

    path   the status file
    names  names of all clients
    log    writes a line to the server's log; called with each line that `say` gets
    news   returns new lines for the log, such as those of the guard (the proxy before Flower)
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        log: Log,
        news: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._path = path
        self._log = log
        self._news = news
        self._written = 0.0
        self._task = "classify"
        self._refusals: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._facts: dict[str, Any] = {"state": "waiting", "pid": os.getpid(), "round": 0}
        self._clients: dict[str, dict[str, Any]] = {
            name: {"connected": False, "since": None, "refusals": 0} for name in names
        }

    def say(self, line: str) -> None:
        """Write a line to the log. Lines about left-out clients also go to the status file."""
        self._log(line)
        if isinstance(line, LogLine) and line.event == "left_out":
            self._refusals.append({"time": _now(), **line.fields})
            client = self._clients.get(line.fields["client"])
            if client is not None:
                client["refusals"] += 1
            self._write()

    def seen(self, connected: Collection[str]) -> None:
        """Record in the status file which clients are connected at this moment."""
        for line in self._news():
            self._log(line)
        changed = False
        for name, client in self._clients.items():
            if client["connected"] != (name in connected):
                client |= {"connected": name in connected, "since": _now()}
                changed = True
        if changed or time.monotonic() - self._written > WRITE_S:
            self._write()

    def on_start(self, job: Job) -> None:
        self._task = job.model.task.name
        self._facts |= {"rounds": job.config.run.rounds}
        self._write()

    def on_round(self, round: Round) -> None:
        self._facts |= {"state": "training", "round": round.t}
        if self._task == "causal":
            scores = {"perplexity": perplexity(round.loss)}
        elif self._task == "regress":
            scores = {"r2": round.r2}
        else:
            scores = {"accuracy": round.accuracy}
        self._facts |= {name: value for name, value in scores.items() if value is not None}
        if round.epsilon is not None:
            # An observer of the network may see which clients take part in a round. For such a
            # third party, epsilon is as large as for the server.
            self._facts["epsilon"] = {"server": round.epsilon, "third_party": round.epsilon}
        self._write()

    def on_end(self, result: dict[str, Any]) -> None:
        self._facts["state"] = "finished"
        self._write()

    def close(self) -> None:
        if self._facts["state"] in RUNNING:
            self._facts["state"] = "stopped"
        self._write()

    def _write(self) -> None:
        facts = {
            **self._facts,
            "updated": _now(),
            "clients": self._clients,
            "refusals": list(self._refusals),
        }
        self._written = time.monotonic()
        write_file(self._path, lambda file: file.write(json.dumps(facts).encode()))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_status(out: Path) -> dict[str, Any] | None:
    """Return the status of the federation whose run is in `out`; None if it has no status file."""
    path = status_file(out)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DpfedError(f"{path} cannot be read: {error}") from None
    if found.get("state") in RUNNING and not _runs(found.get("pid")):
        found["state"] = "killed"
    return found


def _runs(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def headline(status: Mapping[str, Any]) -> str:
    """Return state, round, score and epsilon of a federation as one line of text."""
    parts = [f"{status['state']}, round {status['round']} of {status.get('rounds', '?')}"]
    if status.get("accuracy") is not None:
        parts.append(f"accuracy {show_score(status['accuracy'])}")
    if status.get("r2") is not None:
        parts.append(f"R2 {show_score(status['r2'])}")
    if status.get("perplexity") is not None:
        parts.append(f"perplexity {show_perplexity(status['perplexity'])}")
    for observer, value in status.get("epsilon", {}).items():
        parts.append(f"epsilon {show_loss(value, 2)} for the {observer.replace('_', ' ')}")
    return ", ".join(parts)


def client_rows(status: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of clients: name, connection, and how often the client was left out."""
    return [
        [name, _connection(client), str(client["refusals"])]
        for name, client in status["clients"].items()
    ]


def _connection(client: Mapping[str, Any]) -> str:
    if client["since"] is None:
        return "has not connected"
    return f"{'connected' if client['connected'] else 'away'} since {client['since']}"


def refusal_rows(status: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of the latest refusals, newest first: round, client and reason."""
    return [
        [str(each["round"]), each["client"], each["reason"]]
        for each in reversed(status["refusals"])
    ]


def lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the status of a federation as lines of text."""
    yield headline(status)
    for name, connection, refusals in client_rows(status):
        left_out = f", left out {refusals} times" if refusals != "0" else ""
        yield f"  {name:20} {connection}{left_out}"
    for round, client, reason in refusal_rows(status):
        yield f"  round {round}: {client} was left out: {reason}"
    yield f"updated {status['updated']}; a client's total epsilon is in its own ledger only"

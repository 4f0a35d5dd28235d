"""`dpfed client` as an attacker or an accident would have it: `python faulty_client.py FAULTS FOLDER client.toml [...]`.

FAULTS, separated by commas, are what becomes of the first, second, ... round that it is asked to train in ("ok": nothing, as
for all that come after the last one; a client that went away is asked again, and then has its fault again); FOLDER is where it
leaves marks for whoever started it, and waits for others.
Two are there from the start: `clock`, every row of its ledger lies ten years ahead; `gate`, it connects when FOLDER has a
file of that name.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpfed.federation import messages
from dpfed.federation.client.client import Client
from dpfed.federation.messages import Receipt, Reply, Scoring

YEARS = 10 * 365 * 86400.0
SLOW = 24.0
SECRET = "patient Smith, born 1950"


class Trap:
    """What it does when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def changed(data: bytes, change: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """An honest reply with another delta."""
    _, table, fields = messages._read(data, 1 << 30, ("reply",))
    return messages.pack(
        Reply(messages._terms(Receipt, table), {**fields, "delta": change(fields["delta"])})
    )


def nan(delta: torch.Tensor) -> torch.Tensor:
    delta[0] = float("nan")
    return delta


class Faults:
    def __init__(self, faults: list[str], folder: Path) -> None:
        self._faults, self._folder = faults, folder
        self._asked: dict[int, str] = {}  # the fault of each round
        self._replies: dict[int, bytes] = {}
        self._answer, self._compute = Client.answer, Client._compute
        self._now = ""

    def answer(self, client: Client, data: bytes) -> bytes:
        asked = messages.unpack_any(data, 1 << 30)
        if isinstance(asked, Scoring):
            return self._answer(client, data)
        t, count = asked.terms.round, len(self._asked)
        self._now = self._asked.setdefault(
            t, self._faults[count] if count < len(self._faults) else "ok"
        )
        if self._now == "raise":
            raise ValueError(SECRET)
        if self._now == "slow":
            time.sleep(SLOW)
        reply = self._answer(client, data)
        before = next((self._replies[i] for i in sorted(self._replies, reverse=True) if i < t), b"")
        self._replies[t] = reply
        makers: dict[str, Callable[[], bytes]] = {
            "nan": lambda: changed(reply, nan),
            "shape": lambda: changed(reply, lambda delta: delta[1:]),
            "norm": lambda: changed(reply, lambda delta: delta * 0 + 1e9),
            "old": lambda: before,
            "header": lambda: (2 << 30).to_bytes(8, "little") + b'{"delta":' + b" " * 1000,
            "pickle": lambda: pickle.dumps(Trap(self._folder / "trapped")),
        }
        return makers.get(self._now, lambda: reply)()

    def compute(self, client: Client, *given: Any) -> Any:
        """`hang`: charged, and never computed; `wait`: computed when somebody says so."""
        if self._now in ("hang", "wait"):
            (self._folder / f"{self._now}ing").touch()
            while self._now == "hang" or not (self._folder / "go").exists():
                time.sleep(0.05)
        return self._compute(client, *given)


def main() -> None:
    names, folder, arguments = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3:]
    faults = Faults([name for name in names if name not in ("clock", "gate")], folder)
    Client.answer = lambda self, data: faults.answer(self, data)  # type: ignore[method-assign]
    Client._compute = lambda self, *given: faults.compute(self, *given)  # type: ignore[method-assign]
    if "clock" in names:
        real = time.time
        time.time = lambda: real() + YEARS  # type: ignore[assignment]
    import dpfed.federation.flower.apps

    while "gate" in names and not (folder / "gate").exists():
        time.sleep(0.05)
    sys.argv = ["dpfed", "client", *arguments]
    from dpfed.cli.main import main as dpfed

    dpfed()


if __name__ == "__main__":
    main()
